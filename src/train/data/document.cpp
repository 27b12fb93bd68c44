#include "train/data/document.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "media/sniff.h"
#include "text/utf8.h"

namespace m3::data {
namespace {

std::span<const std::byte> as_bytes(const std::string& text) { return std::as_bytes(std::span(text.data(), text.size())); }

const char* file_type(const std::string& bytes) {
  switch (sniff_media(as_bytes(bytes))) {
    case MediaKind::kPng: return "png";
    case MediaKind::kJpeg: return "jpg";
    case MediaKind::kWebp: return "webp";
    case MediaKind::kGif: return "gif";
    default: return "bin";
  }
}

std::string encoded(const Picture& picture) {
  if (!picture.bytes.empty()) return picture.bytes;
  const std::vector<std::byte> png = encode_png(picture.pixels);
  return {reinterpret_cast<const char*>(png.data()), png.size()};
}

std::string type_of(const Picture& picture) { return picture.bytes.empty() ? "png" : picture.type; }

// Fields of one JSON object by name; every field must have been asked for by the end.
class Fields {
 public:
  Fields(const JsonValue& object, std::string where) : object_(object), where_(std::move(where)) {
    M3_CHECK(object.is_object(), "{}: want an object, got {}", where_, object.kind_name());
  }
  const JsonValue* find(std::string_view name) {
    seen_.emplace_back(name);
    return object_.find(name);
  }
  const JsonValue& at(std::string_view name) {
    const JsonValue* value = find(name);
    M3_CHECK(value != nullptr, "{}: field \"{}\" is missing", where_, name);
    return *value;
  }
  std::string text(std::string_view name) {
    const JsonValue& value = at(name);
    M3_CHECK(value.is_string(), "{}: field \"{}\" must be text", where_, name);
    return value.text();
  }
  std::string optional_text(std::string_view name) { return object_.find(name) != nullptr ? text(name) : (find(name), ""); }
  double number(std::string_view name) {
    const JsonValue& value = at(name);
    M3_CHECK(value.is_number(), "{}: field \"{}\" must be a number", where_, name);
    return value.as_double();
  }
  int64_t integer(std::string_view name) { return to_integer(at(name), name); }
  int64_t to_integer(const JsonValue& value, std::string_view name) {
    const double v = value.is_number() ? value.as_double() : -1;
    M3_CHECK(value.is_integer() && v >= 0 && v < 0x1p53, "{}: field \"{}\" must be a count", where_, name);
    return static_cast<int64_t>(v);
  }
  const std::vector<JsonValue>& list(std::string_view name) {
    const JsonValue& value = at(name);
    M3_CHECK(value.is_array(), "{}: field \"{}\" must be a list", where_, name);
    return value.items();
  }
  void finish() {
    for (const std::string& key : object_.keys()) {
      M3_CHECK(std::find(seen_.begin(), seen_.end(), key) != seen_.end(), "{}: unknown field \"{}\"", where_, key);
    }
  }
  const std::string& where() const { return where_; }

 private:
  const JsonValue& object_;
  std::string where_;
  std::vector<std::string> seen_;
};

JsonValue write_segment(const Segment& segment, const std::vector<std::string>& files) {
  JsonValue out = JsonValue::object();
  if (segment.kind == Segment::Kind::kText) {
    out.append_member("type", JsonValue::string("text"));
    out.append_member("text", JsonValue::string(segment.text));
    if (segment.weight != 1) out.append_member("weight", JsonValue::number(segment.weight));
    if (segment.markers) out.append_member("markers", JsonValue::boolean(true));
    return out;
  }
  const bool video = segment.kind == Segment::Kind::kVideo;
  out.append_member("type", JsonValue::string(video ? "video" : "image"));
  if (video) {
    JsonValue list = JsonValue::array();
    for (const std::string& file : files) list.push_back(JsonValue::string(file));
    out.append_member("files", std::move(list));
  } else {
    out.append_member("file", JsonValue::string(files.at(0)));
  }
  out.append_member("w", JsonValue::integer(segment.pictures[0].width));
  out.append_member("h", JsonValue::integer(segment.pictures[0].height));
  if (video) {
    if (segment.fps > 0) out.append_member("fps", JsonValue::number(segment.fps));
    JsonValue frames = JsonValue::array();
    for (int64_t frame : segment.frames) frames.push_back(JsonValue::integer(frame));
    out.append_member("frames", std::move(frames));
  }
  return out;
}

// The members after the JSON, taken in order.
class MediaMembers {
 public:
  explicit MediaMembers(const std::vector<Member>& members) : members_(members) {}
  Picture take(const std::string& name, int64_t height, int64_t width, const std::string& where) {
    M3_CHECK(next_ < members_.size(), "{}: member {} is missing", where, name);
    const Member& member = members_[next_++];
    M3_CHECK(member.name == name, "{}: member {} found where {} belongs", where, member.name, name);
    M3_CHECK(height > 0 && width > 0 && height < (1 << 24) && width < (1 << 24), "{}: {} x {} pixels", where, height, width);
    Picture picture;
    picture.bytes = member.bytes;
    picture.type = file_type(member.bytes);
    picture.height = static_cast<int>(height);
    picture.width = static_cast<int>(width);
    return picture;
  }
  bool done() const { return next_ == members_.size(); }
  const std::string& next_name() const { return members_[next_].name; }

 private:
  const std::vector<Member>& members_;
  size_t next_ = 1;
};

Segment read_segment(const JsonValue& value, const std::string& where, MediaMembers& media) {
  Fields fields(value, where);
  const std::string type = fields.text("type");
  Segment out;
  if (type == "text") {
    out.text = fields.text("text");
    if (const JsonValue* weight = fields.find("weight")) {
      M3_CHECK(weight->is_number() && weight->as_double() >= 0, "{}: \"weight\" must be a number, 0 or more", where);
      out.weight = static_cast<float>(weight->as_double());
    }
    if (const JsonValue* markers = fields.find("markers")) out.markers = markers->is_bool() && markers->as_bool();
  } else if (type == "image") {
    out.kind = Segment::Kind::kImage;
    out.pictures.push_back(media.take(fields.text("file"), fields.integer("h"), fields.integer("w"), where));
  } else if (type == "video") {
    out.kind = Segment::Kind::kVideo;
    const int64_t height = fields.integer("h"), width = fields.integer("w");
    for (const JsonValue& file : fields.list("files")) {
      M3_CHECK(file.is_string(), "{}: \"files\" must hold names", where);
      out.pictures.push_back(media.take(file.text(), height, width, where));
    }
    if (const JsonValue* fps = fields.find("fps")) out.fps = fps->is_number() ? fps->as_double() : 0;
    for (const JsonValue& frame : fields.list("frames")) out.frames.push_back(fields.to_integer(frame, "frames"));
    M3_CHECK(!out.pictures.empty() && out.frames.size() == out.pictures.size(), "{}: {} frame numbers for {} files", where,
             out.frames.size(), out.pictures.size());
  } else {
    M3_FAIL("{}: unknown type \"{}\"", where, type);
  }
  fields.finish();
  return out;
}

}  // namespace

Picture Picture::of(Image pixels) {
  Picture picture;
  picture.height = pixels.height;
  picture.width = pixels.width;
  picture.pixels = std::move(pixels);
  return picture;
}

Picture Picture::of_file(std::string bytes, const MediaLimits& limits) {
  const Image image = decode_image(as_bytes(bytes), limits);
  Picture picture;
  picture.height = image.height;
  picture.width = image.width;
  picture.type = file_type(bytes);
  picture.bytes = std::move(bytes);
  return picture;
}

Image Picture::decode(const MediaLimits& limits) const {
  Image image = pixels.height > 0 ? pixels : decode_image(as_bytes(bytes), limits);
  M3_CHECK(image.height == height && image.width == width, "a picture has {} x {} pixels, {} x {} were declared", image.height,
           image.width, height, width);
  return image;
}

Segment Segment::of_text(std::string text, float weight, bool markers) {
  Segment segment;
  segment.text = std::move(text);
  segment.weight = weight;
  segment.markers = markers;
  return segment;
}

Segment Segment::of_image(Picture picture) {
  Segment segment;
  segment.kind = Kind::kImage;
  segment.pictures.push_back(std::move(picture));
  return segment;
}

Segment Segment::of_video(std::vector<Picture> pictures, double fps, std::vector<int64_t> frames) {
  Segment segment;
  segment.kind = Kind::kVideo;
  segment.pictures = std::move(pictures);
  segment.fps = fps;
  segment.frames = std::move(frames);
  return segment;
}

void DocumentCounts::add(const Document& document) {
  ++documents;
  for (const Segment& segment : document.segments) {
    text_bytes += static_cast<int64_t>(segment.text.size());
    images += segment.kind == Segment::Kind::kImage;
    videos += segment.kind == Segment::Kind::kVideo;
    if (segment.kind == Segment::Kind::kVideo) frames += static_cast<int64_t>(segment.pictures.size());
  }
}

void DocumentCounts::add(const DocumentCounts& other) {
  documents += other.documents;
  text_bytes += other.text_bytes;
  images += other.images;
  videos += other.videos;
  frames += other.frames;
}

std::vector<Member> to_members(const Document& document, const std::string& key) {
  M3_CHECK(!document.segments.empty(), "document {} is empty", document.id);
  std::vector<Member> members(1);
  JsonValue segments = JsonValue::array();
  for (size_t i = 0; i < document.segments.size(); ++i) {
    const Segment& segment = document.segments[i];
    M3_CHECK(utf8_find_invalid(segment.text) == std::string_view::npos, "document {}, segment {}: not valid UTF-8", document.id, i);
    M3_CHECK(segment.kind == Segment::Kind::kText || !segment.pictures.empty(), "document {}, segment {}: no picture",
             document.id, i);
    std::vector<std::string> files;
    for (size_t k = 0; k < segment.pictures.size(); ++k) {
      const std::string frame = segment.kind == Segment::Kind::kVideo ? fmt::format(".{:03}", k) : "";
      files.push_back(fmt::format("{}.{}{}.{}", key, i, frame, type_of(segment.pictures[k])));
      members.push_back({files.back(), encoded(segment.pictures[k])});
    }
    segments.push_back(write_segment(segment, files));
  }
  JsonValue head = JsonValue::object();
  head.append_member("id", JsonValue::string(document.id));
  head.append_member("source", JsonValue::string(document.source));
  for (const auto& [name, text] : {std::pair{"licence", &document.licence}, {"lang", &document.lang}, {"item", &document.item}}) {
    if (!text->empty()) head.append_member(name, JsonValue::string(*text));
  }
  head.append_member("segments", std::move(segments));
  members[0] = {key + ".json", head.dump()};
  return members;
}

Document from_members(const std::vector<Member>& members) {
  M3_CHECK(!members.empty() && members[0].name.ends_with(".json"), "a document must begin with its .json member");
  const std::string& name = members[0].name;
  const JsonValue root = JsonValue::parse(members[0].bytes, name);
  Fields fields(root, name);
  Document out;
  out.id = fields.text("id");
  out.source = fields.text("source");
  out.licence = fields.optional_text("licence");
  out.lang = fields.optional_text("lang");
  out.item = fields.optional_text("item");
  MediaMembers media(members);
  const std::vector<JsonValue>& segments = fields.list("segments");
  for (size_t i = 0; i < segments.size(); ++i) {
    out.segments.push_back(read_segment(segments[i], fmt::format("{}: segments[{}]", name, i), media));
  }
  fields.finish();
  M3_CHECK(!out.segments.empty(), "{}: the document has no segment", name);
  M3_CHECK(media.done(), "{}: member {} belongs to no segment", name, media.next_name());
  return out;
}

}  // namespace m3::data
