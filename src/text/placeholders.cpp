#include "text/placeholders.h"

#include <algorithm>
#include <cstdio>

#include "base/check.h"
#include "text/chat.h"

namespace m3 {

namespace {

using namespace chat_token;

void append_span(std::string_view mark, int64_t num_tokens, std::string& out) {
  out += kMediaStart;
  for (int64_t i = 0; i < num_tokens; ++i) out += mark;
  out += kMediaEnd;
}

void append_video(const VideoSpan& video, std::string& out) {
  M3_CHECK(video.seconds.empty() || static_cast<int64_t>(video.seconds.size()) == video.num_steps,
           "a video of {} temporal steps has {} timestamps", video.num_steps, video.seconds.size());
  for (int64_t step = 0; step < video.num_steps; ++step) {
    if (!video.seconds.empty()) out += timestamp_text(video.seconds[static_cast<size_t>(step)]);
    append_span(kVideo, video.tokens_per_step, out);
  }
}

}  // namespace

std::string timestamp_text(double seconds) {
  char text[64];
  const int length = std::snprintf(text, sizeof text, "%.1f", seconds);
  M3_CHECK(length > 0 && length < static_cast<int>(sizeof text),
           "a video timestamp of {} s is out of range", seconds);
  return "]<]" + std::string(text) + " seconds[>[";
}

std::string expand_placeholders(std::string_view prompt, std::span<const ImageSpan> images,
                                std::span<const VideoSpan> videos) {
  std::string out;
  size_t num_images = 0, num_videos = 0, at = 0;
  size_t image = prompt.find(kImage), video = prompt.find(kVideo);  // next mark of each kind
  while (image != prompt.npos || video != prompt.npos) {
    out += prompt.substr(at, std::min(image, video) - at);
    if (image < video) {
      if (num_images < images.size()) append_span(kImage, images[num_images].num_tokens, out);
      ++num_images;
      at = image + kImage.size();
      image = prompt.find(kImage, at);
    } else {
      if (num_videos < videos.size()) append_video(videos[num_videos], out);
      ++num_videos;
      at = video + kVideo.size();
      video = prompt.find(kVideo, at);
    }
  }
  out += prompt.substr(at);
  M3_CHECK(num_images == images.size(),
           "image count: the prompt has {} image marks, but {} images were given", num_images,
           images.size());
  M3_CHECK(num_videos == videos.size(),
           "video count: the prompt has {} video marks, but {} videos were given", num_videos,
           videos.size());
  return out;
}

}  // namespace m3
