#include "text/tool_arguments.h"

#include <algorithm>
#include <charconv>

namespace m3 {

namespace {

constexpr std::string_view kSpace = " \t\r\n";

std::string_view strip(std::string_view text) {
  const size_t first = text.find_first_not_of(kSpace);
  if (first == text.npos) return {};
  return text.substr(first, text.find_last_not_of(kSpace) - first + 1);
}

// -?digits[.digits][e[+-]digits], as decimal digits and a power of ten.
struct Decimal {
  bool negative = false;
  std::string digits;    // without leading zeros; "0" for zero
  int64_t exponent = 0;  // value = digits * 10^exponent
  bool is_plain = true;  // neither fraction nor exponent was written

  bool is_zero() const { return digits == "0"; }
  int64_t adjusted() const {
    return exponent + static_cast<int64_t>(digits.size()) - 1;
  }  // of the first digit
};

size_t skip_digits(std::string_view text, size_t at) {
  while (at < text.size() && text[at] >= '0' && text[at] <= '9') ++at;
  return at;
}

std::optional<Decimal> read_decimal(std::string_view text) {
  Decimal out;
  size_t at = text.starts_with('-') ? 1 : 0;
  out.negative = at == 1;
  size_t end = skip_digits(text, at);
  if (end == at) return std::nullopt;
  std::string digits(text.substr(at, end - at));
  at = end;
  if (at < text.size() && text[at] == '.') {
    end = skip_digits(text, at + 1);
    if (end == at + 1) return std::nullopt;
    digits += text.substr(at + 1, end - at - 1);
    out.exponent = -static_cast<int64_t>(end - at - 1);
    out.is_plain = false;
    at = end;
  }
  if (at < text.size() && (text[at] == 'e' || text[at] == 'E')) {
    ++at;
    const bool minus = at < text.size() && text[at] == '-';
    if (at < text.size() && (text[at] == '-' || text[at] == '+')) ++at;
    end = skip_digits(text, at);
    if (end == at) return std::nullopt;
    constexpr int64_t kFarOut = 1'000'000'000;  // beyond every limit below
    int64_t power = kFarOut;
    const auto parsed = std::from_chars(text.data() + at, text.data() + end, power);
    if (parsed.ec != std::errc()) power = kFarOut;
    power = std::min(power, kFarOut);
    out.exponent += minus ? -power : power;
    out.is_plain = false;
    at = end;
  }
  if (at != text.size()) return std::nullopt;
  const size_t first = digits.find_first_not_of('0');
  out.digits = first == digits.npos ? "0" : digits.substr(first);
  return out;
}

std::optional<JsonValue> to_integer(std::string_view text) {
  constexpr int64_t kMaxAdjusted = 40;  // 41 digits
  const auto decimal = read_decimal(text);
  if (!decimal || decimal->adjusted() > kMaxAdjusted) return std::nullopt;
  std::string digits = decimal->digits;
  if (decimal->is_zero()) return JsonValue::integer(digits);
  if (decimal->exponent >= 0) {
    digits.append(static_cast<size_t>(decimal->exponent), '0');
  } else {
    const int64_t num_fraction = -decimal->exponent;
    if (num_fraction >= static_cast<int64_t>(digits.size())) return std::nullopt;
    const size_t whole = digits.size() - static_cast<size_t>(num_fraction);
    if (digits.find_first_not_of('0', whole) != digits.npos) return std::nullopt;
    digits.resize(whole);
  }
  return JsonValue::integer((decimal->negative ? "-" : "") + digits);
}

std::optional<JsonValue> to_number(std::string_view text) {
  const auto decimal = read_decimal(text);
  if (!decimal) return std::nullopt;
  double value = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
  if (parsed.ec == std::errc::result_out_of_range) {
    if (decimal->adjusted() > 0) return std::nullopt;
    value = decimal->negative ? -0.0 : 0.0;  // too small for a double
  }
  if (decimal->is_plain)
    return JsonValue::integer((decimal->negative ? "-" : "") + decimal->digits);
  return JsonValue::number(value);
}

std::optional<JsonValue> to_boolean(std::string_view text) {
  const auto equals = [&](std::string_view word) {
    return std::equal(text.begin(), text.end(), word.begin(), word.end(), [](char a, char b) {
      return (a >= 'A' && a <= 'Z' ? a - 'A' + 'a' : a) == b;
    });
  };
  if (equals("true")) return JsonValue::boolean(true);
  if (equals("false")) return JsonValue::boolean(false);
  return std::nullopt;
}

// What a value is made of: an element, or a part of one seen as one.
struct Value {
  const std::vector<CallElement>* children = nullptr;
  std::string_view raw;
  bool cut = false;
};

class Converter {
 public:
  explicit Converter(const std::string& raw) : raw_(raw) {}

  Value value_of(const CallElement& element) const {
    return {&element.children,
            std::string_view(raw_).substr(element.raw_begin, element.raw_end - element.raw_begin),
            element.cut};
  }

  // Nothing: too little of a value has arrived.
  std::optional<JsonValue> convert(const Value& value, const ToolSchema& schema) const {
    const SchemaTypes& types = schema.types();
    if (types.only_unknown()) return JsonValue::string(std::string(value.raw));
    if (value.children != nullptr && !value.children->empty())
      return convert_children(value, schema);
    const std::string text(value.raw);
    const std::string_view bare = strip(text);
    if (value.cut) {  // half a value is never converted
      const bool keep =
          types.empty() ? !bare.empty() : types.has(SchemaTypes::kString) && !text.empty();
      return keep ? std::optional(JsonValue::string(text)) : std::nullopt;
    }
    if (types.empty()) {
      auto json = JsonValue::try_parse(text);
      return json ? std::move(*json) : JsonValue::string(text);
    }
    if (types.has(SchemaTypes::kNull) && bare == "null") return JsonValue();
    if (types.has(SchemaTypes::kString)) return JsonValue::string(text);
    std::optional<JsonValue> scalar;
    if (types.has(SchemaTypes::kInteger)) scalar = to_integer(bare);
    if (!scalar && types.has(SchemaTypes::kNumber)) scalar = to_number(bare);
    if (!scalar && types.has(SchemaTypes::kBoolean)) scalar = to_boolean(bare);
    if (scalar) return scalar;
    if (types.has(SchemaTypes::kArray | SchemaTypes::kObject)) {
      auto json = JsonValue::try_parse(text);
      if (json && ((json->is_array() && types.has(SchemaTypes::kArray)) ||
                   (json->is_object() && types.has(SchemaTypes::kObject)))) {
        return json;
      }
      if (bare.empty())
        return types.has(SchemaTypes::kArray) ? JsonValue::array() : JsonValue::object();
      if (types.has(SchemaTypes::kArray)) {  // bare text is the only element
        auto item = convert(value, schema.item(0));
        return JsonValue::array(item ? std::vector{std::move(*item)} : std::vector<JsonValue>{});
      }
    }
    return JsonValue::string(text);
  }

 private:
  std::optional<JsonValue> convert_children(const Value& value, const ToolSchema& schema) const {
    const SchemaTypes& types = schema.types();
    const auto is_item = [](const CallElement& child) { return child.name == "item"; };
    const bool all_items = std::all_of(value.children->begin(), value.children->end(), is_item);
    if (types.empty()
            ? all_items
            : types.has(SchemaTypes::kArray) && (!types.has(SchemaTypes::kObject) || all_items)) {
      return convert_items(value, schema);
    }
    if (types.empty() || types.has(SchemaTypes::kObject)) {
      ArgumentBuilder builder(raw_, schema);
      for (const CallElement& child : *value.children) builder.add(child);
      return builder.take();
    }
    return JsonValue::string(std::string(value.raw));
  }

  JsonValue convert_items(const Value& value, const ToolSchema& schema) const {
    const ToolSchema first = schema.item(0);
    bool is_one_object = true;  // members of one object without its item tag
    for (const CallElement& child : *value.children) {
      is_one_object = is_one_object && child.name != "item" && first.declares(child.name);
    }
    JsonValue array = JsonValue::array();
    if (is_one_object) {
      auto item = convert({value.children, {}, value.cut}, first);
      if (item) array.push_back(std::move(*item));
      return array;
    }
    for (size_t i = 0; i < value.children->size(); ++i) {
      auto item = convert(value_of((*value.children)[i]), schema.item(i));
      if (item) array.push_back(std::move(*item));
    }
    return array;
  }

  const std::string& raw_;
};

}  // namespace

ArgumentBuilder::Added ArgumentBuilder::add(const CallElement& element) {
  const Converter converter(*raw_);
  std::string key = element.name;
  Value value = converter.value_of(element);
  if (schema_.declares(element.closed_by) && !schema_.declares(element.name)) {
    // The opening tag is missing, and the value starts with a tag of its own.
    const size_t begin = element.raw_begin - element.name.size() - 2;
    key = element.closed_by;
    value = {nullptr, std::string_view(*raw_).substr(begin, element.raw_end - begin), false};
  }
  const ToolSchema member = schema_.member(key);
  // Of a cut value under an undeclared name nobody knows whether the name is the start of a value.
  if (value.cut && schema_.has_properties() && !schema_.declares(key) && member.is_free())
    return {};
  auto converted = converter.convert(value, member);
  if (!converted) return {};

  const auto [at, is_new] = index_.try_emplace(key, object_.size());
  const size_t index = at->second;
  if (is_new) {
    const bool may_merge = member.types().empty() ||
                           (converted->is_array() && member.types().has(SchemaTypes::kArray));
    object_.append_member(std::move(key), std::move(*converted));
    repeated_.push_back(false);
    return {Change::kNewKey, index, may_merge};
  }
  JsonValue& earlier = object_.item(index);
  if (earlier.is_array() && member.types().has(SchemaTypes::kArray)) {
    if (converted->is_array()) {
      for (const JsonValue& item : converted->items()) earlier.push_back(item);
    } else {
      earlier.push_back(std::move(*converted));
    }
    return {Change::kMerged, index, true};
  }
  if (member.types().empty()) {
    if (!repeated_[index]) earlier = JsonValue::array({earlier});
    repeated_[index] = true;
    earlier.push_back(std::move(*converted));
    return {Change::kMerged, index, true};
  }
  return {};
}

}  // namespace m3
