// Inside of src/media: is a film file whole? Demuxers are lenient: they show what is there of a cut file.
#pragma once
#include "media/decoders.h"
#include "media/sniff.h"

namespace m3::media {

// Throws where the file ends before a part that its own headers announce (MP4 boxes with media or
// index, the Matroska segment and its clusters, AVI chunks). Formats without lengths pass.
void check_container_is_whole(MediaKind kind, Bytes file);

}  // namespace m3::media
