#include "media/video.h"

#include "base/check.h"
#include "media/container.h"

#ifdef M3_HAVE_VIDEO
extern "C" {
#include <libavcodec/avcodec.h>
#include <libavformat/avformat.h>
#include <libavutil/display.h>
#include <libavutil/pixdesc.h>
#include <libswscale/swscale.h>
}

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#endif

namespace m3 {

#ifndef M3_HAVE_VIDEO

struct VideoReader::Impl {};
VideoReader::VideoReader(std::span<const std::byte>, const MediaLimits&) {
  M3_FAIL("videos are not supported by this build: it lacks FFmpeg (install libavformat-dev, libavcodec-dev, libavutil-dev "
          "and libswscale-dev and configure with -DM3_VIDEO=ON)");
}
int VideoReader::height() const { return 0; }
int VideoReader::width() const { return 0; }
double VideoReader::fps() const { return 0; }
bool VideoReader::next() { return false; }
Image VideoReader::image() const { return {}; }
bool video_supported() { return false; }

#else

namespace {

using media::Bytes;

// FFmpeg reports through one process-wide log. What it says on this thread while a reader works is kept
// for the message of an error; nothing is printed. Errors of a demuxer count: it skips what it cannot
// read and goes on, and the film would be silently shorter.
struct LogCapture {
  std::string last_error;
  int num_demuxer_errors = 0;
};
thread_local LogCapture* log_capture = nullptr;

void on_log(void* context, int level, const char* format, va_list arguments) {
  if (log_capture == nullptr || level > AV_LOG_ERROR) return;
  char line[200];
  std::vsnprintf(line, sizeof(line), format, arguments);
  log_capture->last_error = line;
  while (!log_capture->last_error.empty() && log_capture->last_error.back() == '\n') log_capture->last_error.pop_back();
  const AVClass* kind = context != nullptr ? *static_cast<const AVClass**>(context) : nullptr;
  if (kind != nullptr && kind->category == AV_CLASS_CATEGORY_DEMUXER) ++log_capture->num_demuxer_errors;
}

class LogScope {
 public:
  explicit LogScope(LogCapture* capture) : previous_(log_capture) { log_capture = capture; }
  ~LogScope() { log_capture = previous_; }

 private:
  LogCapture* previous_;
};

// Decoders that may run on a stranger's bytes: those of films people have.
constexpr AVCodecID kCodecs[] = {AV_CODEC_ID_H264, AV_CODEC_ID_HEVC, AV_CODEC_ID_AV1, AV_CODEC_ID_VP8, AV_CODEC_ID_VP9,
                                 AV_CODEC_ID_MPEG4, AV_CODEC_ID_MPEG2VIDEO, AV_CODEC_ID_MPEG1VIDEO, AV_CODEC_ID_MJPEG,
                                 AV_CODEC_ID_THEORA, AV_CODEC_ID_H263, AV_CODEC_ID_PRORES, AV_CODEC_ID_MSMPEG4V3};
constexpr const char* kDecoders = "h264,hevc,libdav1d,libaom-av1,av1,vp8,vp9,mpeg4,mpeg2video,mpeg1video,mjpeg,theora,h263,"
                                  "prores,msmpeg4";

const char* demuxer_name(MediaKind kind) {
  switch (kind) {
    case MediaKind::kMp4: return "mov";
    case MediaKind::kMatroska: return "matroska";
    case MediaKind::kAvi: return "avi";
    case MediaKind::kMpeg: return "mpeg";
    case MediaKind::kMpegTs: return "mpegts";
    case MediaKind::kOgg: return "ogg";
    case MediaKind::kFlv: return "flv";
    default: return nullptr;
  }
}

MediaKind check_kind(Bytes bytes, const MediaLimits& limits) {
  M3_CHECK(static_cast<int64_t>(bytes.size()) <= limits.max_file_bytes,
           "the video file has {} bytes: too large, the limit is {}", bytes.size(), limits.max_file_bytes);
  const MediaKind kind = sniff_media(bytes);
  M3_CHECK(kind != MediaKind::kEmpty, "the video file is empty (0 bytes)");
  M3_CHECK(!is_picture(kind), "this is a picture ({}), not a video: give it as an image", media_kind_name(kind));
  M3_CHECK(is_film(kind), "not a video: unknown format (wanted MP4, MOV, WebM, Matroska, AVI, MPEG, Ogg or FLV; the content "
           "counts, not the name)");
  return kind;
}

// The display matrix as an EXIF orientation: x' = a x + c y, y' = b x + d y, one of the eight ways a
// rectangle fits.
int orientation_of(const AVStream* stream) {
  size_t size = 0;
  const uint8_t* data = av_stream_get_side_data(stream, AV_PKT_DATA_DISPLAYMATRIX, &size);
  if (data == nullptr || size < 9 * sizeof(int32_t)) return 1;
  int32_t m[9];
  std::memcpy(m, data, sizeof(m));
  const int32_t a = m[0], b = m[1], c = m[3], d = m[4];
  if (b == 0 && c == 0 && a != 0 && d != 0) return a > 0 ? (d > 0 ? 1 : 4) : (d > 0 ? 2 : 3);
  if (a == 0 && d == 0 && b != 0 && c != 0) return b > 0 ? (c > 0 ? 5 : 6) : (c > 0 ? 8 : 7);
  M3_FAIL("the video asks to be shown turned by {:.1f} degrees: only multiples of 90 are supported",
          -av_display_rotation_get(m));
}

std::string reason(int code) {
  char text[AV_ERROR_MAX_STRING_SIZE] = "";
  av_strerror(code, text, sizeof(text));
  return text;
}

// FFmpeg reads the film through these: from memory, and nothing else.
struct Input {
  Bytes bytes;
  size_t position = 0;
};

int read_bytes(void* opaque, uint8_t* out, int count) {
  auto* input = static_cast<Input*>(opaque);
  const size_t take = std::min<size_t>(count, input->bytes.size() - input->position);
  if (take == 0) return AVERROR_EOF;
  std::memcpy(out, input->bytes.data() + input->position, take);
  input->position += take;
  return static_cast<int>(take);
}

int64_t seek_bytes(void* opaque, int64_t offset, int whence) {
  auto* input = static_cast<Input*>(opaque);
  const int64_t size = static_cast<int64_t>(input->bytes.size());
  if (whence == AVSEEK_SIZE) return size;
  int64_t target = offset;
  if (whence == SEEK_CUR) target += static_cast<int64_t>(input->position);
  if (whence == SEEK_END) target += size;
  if (target < 0 || target > size) return AVERROR(EINVAL);
  input->position = static_cast<size_t>(target);
  return target;
}

// A container may name other files or addresses: none is ever opened.
int refuse_other_files(AVFormatContext*, AVIOContext**, const char*, int, AVDictionary**) { return AVERROR(EPERM); }

}  // namespace

struct VideoReader::Impl {
  Input input;
  MediaLimits limits;
  MediaKind kind;
  LogCapture log;

  AVIOContext* io = nullptr;
  AVFormatContext* container = nullptr;
  AVCodecContext* decoder = nullptr;
  AVPacket* packet = av_packet_alloc();
  AVFrame* frame = av_frame_alloc();
  AVFrame* ahead = av_frame_alloc();  // the first frame, decoded by the constructor
  SwsContext* scaler = nullptr;
  std::vector<uint8_t> rgb_padded;
  AVStream* stream = nullptr;
  int orientation = 1;
  double fps = 0;
  int height = 0, width = 0;  // as stored
  bool first_is_ahead = false, drained = false;
  int64_t num_frames = 0, num_packets = 0;

  Impl(Bytes bytes, const MediaLimits& limits) : input{bytes}, limits(limits), kind(check_kind(bytes, limits)) {}
  ~Impl();
  void open();
  void open_container();
  void open_decoder();
  bool decode(AVFrame* out);
  void send_packet();
  void check_frame(const AVFrame& got);
  void check_end();
  Image convert();
  [[noreturn]] void damaged(const char* what, int code) {
    const std::string detail = log.last_error.empty() ? reason(code) : log.last_error;
    M3_FAIL("{}: {} (frame {}): the file is damaged or truncated: {}", media_kind_name(kind), what, num_frames, detail);
  }
};

VideoReader::Impl::~Impl() {
  const LogScope scope(&log);
  sws_freeContext(scaler);
  av_frame_free(&ahead);
  av_frame_free(&frame);
  av_packet_free(&packet);
  avcodec_free_context(&decoder);
  avformat_close_input(&container);
  if (io != nullptr) av_freep(&io->buffer);
  avio_context_free(&io);
}

void VideoReader::Impl::open() {
  static const bool quiet = [] {
    av_log_set_callback(on_log);
    return true;
  }();
  (void)quiet;
  media::check_container_is_whole(kind, input.bytes);
  const LogScope scope(&log);
  M3_CHECK(packet != nullptr && frame != nullptr && ahead != nullptr, "video: out of memory");
  open_container();
  open_decoder();
  log = {};  // what the headers brought up does not concern the frames
  first_is_ahead = decode(ahead);
  M3_CHECK(first_is_ahead, "{}: no frame in the video stream", media_kind_name(kind));
  height = ahead->height;
  width = ahead->width;
}

void VideoReader::Impl::open_container() {
  constexpr int kBufferBytes = 1 << 16;
  auto* buffer = static_cast<unsigned char*>(av_malloc(kBufferBytes));
  M3_CHECK(buffer != nullptr, "video: out of memory");
  io = avio_alloc_context(buffer, kBufferBytes, 0, &input, read_bytes, nullptr, seek_bytes);
  container = avformat_alloc_context();
  M3_CHECK(io != nullptr && container != nullptr, "video: out of memory");
  container->pb = io;
  container->flags |= AVFMT_FLAG_CUSTOM_IO;
  container->io_open = refuse_other_files;
  container->codec_whitelist = av_strdup(kDecoders);
  // Frees the container on failure.
  const int opened = avformat_open_input(&container, nullptr, av_find_input_format(demuxer_name(kind)), nullptr);
  if (opened < 0) damaged("the container cannot be read", opened);

  for (unsigned i = 0; i < container->nb_streams; ++i) {
    if (container->streams[i]->codecpar->codec_type != AVMEDIA_TYPE_VIDEO) container->streams[i]->discard = AVDISCARD_ALL;
  }
  const unsigned num_streams = container->nb_streams;
  std::vector<AVDictionary*> options(num_streams, nullptr);
  for (AVDictionary*& option : options) av_dict_set_int(&option, "max_pixels", limits.max_pixels, 0);
  const int probed = avformat_find_stream_info(container, options.empty() ? nullptr : options.data());
  for (AVDictionary*& option : options) av_dict_free(&option);
  if (probed < 0) damaged("the streams cannot be read", probed);
}

void VideoReader::Impl::open_decoder() {
  const char* name = media_kind_name(kind);
  const int idx = av_find_best_stream(container, AVMEDIA_TYPE_VIDEO, -1, -1, nullptr, 0);
  M3_CHECK(idx != AVERROR_STREAM_NOT_FOUND, "{}: no video stream in the file ({} other streams)", name, container->nb_streams);
  M3_CHECK(idx >= 0, "{}: no video stream that can be decoded: {}", name, reason(idx));
  stream = container->streams[idx];
  M3_CHECK(!(stream->disposition & AV_DISPOSITION_ATTACHED_PIC), "{}: no video stream in the file, only a cover picture", name);
  for (unsigned i = 0; i < container->nb_streams; ++i) {
    if (static_cast<int>(i) != idx) container->streams[i]->discard = AVDISCARD_ALL;
  }

  const AVCodecParameters& parameters = *stream->codecpar;
  const char* codec_name = avcodec_get_name(parameters.codec_id);
  const bool known = std::find(std::begin(kCodecs), std::end(kCodecs), parameters.codec_id) != std::end(kCodecs);
  M3_CHECK(known, "{}: the video codec {} is not supported (wanted H.264, HEVC, AV1, VP8, VP9, MPEG-1, -2, -4 or Motion JPEG)",
           name, codec_name);
  media::check_size(name, parameters.height, parameters.width, limits);
  const AVCodec* codec = avcodec_find_decoder(parameters.codec_id);
  M3_CHECK(codec != nullptr, "{}: this FFmpeg has no decoder for {}", name, codec_name);

  fps = av_q2d(stream->avg_frame_rate.num > 0 ? stream->avg_frame_rate : stream->r_frame_rate);
  M3_CHECK(std::isfinite(fps) && fps > 0, "{}: the frame rate is unknown: the file is damaged or has no times", name);
  orientation = orientation_of(stream);

  decoder = avcodec_alloc_context3(codec);
  M3_CHECK(decoder != nullptr && avcodec_parameters_to_context(decoder, &parameters) >= 0, "video: out of memory");
  decoder->pkt_timebase = stream->time_base;
  decoder->max_pixels = limits.max_pixels;
  decoder->err_recognition = AV_EF_EXPLODE | AV_EF_CRCCHECK | AV_EF_BITSTREAM | AV_EF_BUFFER;
  // Concealment stays on: its bookkeeping is what marks a damaged frame, and a marked frame is refused.
  decoder->flags |= AV_CODEC_FLAG_OUTPUT_CORRUPT;  // to be seen and refused here, not dropped
  // Errors and marks stay with their frame; FFmpeg 5's frame threads can hand out a frame before it is marked.
  decoder->thread_count = 1;
  const int opened = avcodec_open2(decoder, codec, nullptr);
  if (opened < 0) damaged("the decoder cannot be started", opened);
}

void VideoReader::Impl::send_packet() {
  for (;;) {
    const int got = av_read_frame(container, packet);
    if (got == AVERROR_EOF) {
      drained = true;
      const int sent = avcodec_send_packet(decoder, nullptr);
      if (sent < 0 && sent != AVERROR_EOF) damaged("the last frames cannot be decoded", sent);
      return;
    }
    if (got < 0 || log.num_demuxer_errors > 0) damaged("the container cannot be read further", got);
    const bool ours = packet->stream_index == stream->index;
    const bool corrupt = packet->flags & AV_PKT_FLAG_CORRUPT;
    if (ours && corrupt) damaged("a frame is incomplete", AVERROR_INVALIDDATA);
    const int sent = ours ? avcodec_send_packet(decoder, packet) : 0;
    if (ours && !(packet->flags & AV_PKT_FLAG_DISCARD)) ++num_packets;
    av_packet_unref(packet);
    if (sent < 0) damaged("a frame cannot be decoded", sent);
    if (ours) return;
  }
}

bool VideoReader::Impl::decode(AVFrame* out) {
  for (;;) {
    const int got = avcodec_receive_frame(decoder, out);
    if (got == 0) {
      check_frame(*out);
      ++num_frames;
      return true;
    }
    if (got == AVERROR_EOF) {
      check_end();
      return false;
    }
    if (got != AVERROR(EAGAIN)) damaged("a frame cannot be decoded", got);
    M3_CHECK(!drained, "{}: the decoder stopped before the end", media_kind_name(kind));
    send_packet();
  }
}

void VideoReader::Impl::check_frame(const AVFrame& got) {
  if ((got.flags & AV_FRAME_FLAG_CORRUPT) || got.decode_error_flags != 0) damaged("a frame is damaged", AVERROR_INVALIDDATA);
  media::check_size(media_kind_name(kind), got.height, got.width, limits);
  M3_CHECK(num_frames < limits.max_source_frames, "the video has too many frames: the limit is {}", limits.max_source_frames);
  M3_CHECK(height == 0 || (got.height == height && got.width == width),
           "the video changes its size from {} x {} to {} x {} at frame {}: this is not supported", height, width, got.height,
           got.width, num_frames);
}

// A decoder drops frames whose references are missing. Where each packet is one frame, the counts tell.
void VideoReader::Impl::check_end() {
  const AVCodecID id = stream->codecpar->codec_id;
  const bool one_each = (id == AV_CODEC_ID_H264 || id == AV_CODEC_ID_HEVC) && kind != MediaKind::kMpegTs &&
                        decoder->field_order <= AV_FIELD_PROGRESSIVE;
  M3_CHECK(!one_each || num_frames == num_packets || num_frames == 0,
           "{}: the file is damaged: {} frames are stored and only {} can be shown", media_kind_name(kind), num_packets,
           num_frames);
}

Image VideoReader::Impl::convert() {
  const LogScope scope(&log);
  const auto format = static_cast<AVPixelFormat>(frame->format);
  const char* format_name = av_get_pix_fmt_name(format);
  const bool full_range = frame->color_range == AVCOL_RANGE_JPEG ||
                          (format_name != nullptr && std::strncmp(format_name, "yuvj", 4) == 0);
  scaler = sws_getCachedContext(scaler, width, height, format, width, height, AV_PIX_FMT_RGB24,
                                SWS_BICUBIC | SWS_ACCURATE_RND | SWS_FULL_CHR_H_INT | SWS_BITEXACT, nullptr, nullptr, nullptr);
  M3_CHECK(scaler != nullptr, "{}: the pixel format {} cannot be converted", media_kind_name(kind),
           format_name != nullptr ? format_name : "?");
  // Untagged matrices are BT.601, swscale's own default.
  const int* matrix = sws_getCoefficients(frame->colorspace);
  sws_setColorspaceDetails(scaler, matrix, full_range, sws_getCoefficients(SWS_CS_DEFAULT), 1, 0, 1 << 16, 1 << 16);

  // swscale writes whole vectors: rows padded to 64 bytes, then copied tight.
  const int stride = (3 * width + 63) / 64 * 64;
  rgb_padded.resize(static_cast<size_t>(stride) * (height + 1));
  uint8_t* out[4] = {rgb_padded.data()};
  const int strides[4] = {stride};
  const int rows = sws_scale(scaler, frame->data, frame->linesize, 0, height, out, strides);
  M3_CHECK(rows == height, "{}: converting the colours of a frame failed", media_kind_name(kind));
  Image image(height, width);
  for (int y = 0; y < height; ++y) std::memcpy(image.row(y), rgb_padded.data() + static_cast<size_t>(y) * stride, 3 * width);
  return image;
}

VideoReader::VideoReader(std::span<const std::byte> bytes, const MediaLimits& limits)
    : impl_(std::make_unique<Impl>(bytes, limits)) {
  impl_->open();
}

int VideoReader::height() const { return impl_->orientation >= 5 ? impl_->width : impl_->height; }
int VideoReader::width() const { return impl_->orientation >= 5 ? impl_->height : impl_->width; }
double VideoReader::fps() const { return impl_->fps; }

bool VideoReader::next() {
  const LogScope scope(&impl_->log);
  if (impl_->first_is_ahead) {
    impl_->first_is_ahead = false;
    std::swap(impl_->frame, impl_->ahead);
    return true;
  }
  return impl_->decode(impl_->frame);
}

Image VideoReader::image() const { return apply_orientation(impl_->convert(), impl_->orientation); }

bool video_supported() { return true; }

#endif

VideoReader::~VideoReader() = default;
VideoReader::VideoReader(VideoReader&&) noexcept = default;

}  // namespace m3
