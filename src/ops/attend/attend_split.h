// How the tiles of a split attention are shared out (attend_sm90.h): plain arithmetic, the same on
// the device and in its test. A unit is a tile of one group; its list has kAttendTileParts parts.
#pragma once
#ifdef __CUDACC__
#define M3_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define M3_HOST_DEVICE inline
#endif

namespace m3 {

constexpr int kAttendTileParts = 16;
constexpr int kAttendMaxSplitUnits = 1056;  // of a call
constexpr int kAttendMaxSms = 160;          // the workspace is sized without a device

// CTA c has the parts [begin(c), begin(c + 1)) of all units' parts, at least two, so that the CTAs
// with a piece of one unit are consecutive, and at most kAttendTileParts / 2 + 1. A piece of a unit that is not whole has the place
// unit + CTA: both only grow, so no two have the same.
struct AttendShares {
  int all, ctas;

  M3_HOST_DEVICE AttendShares(int units, int max_ctas)
      : all(units * kAttendTileParts),
        ctas(max_ctas < all / 2 ? max_ctas : all / 2) {}
  M3_HOST_DEVICE int begin(int cta) const {
    return (cta < ctas ? cta : ctas) * all / ctas;
  }
  // The last CTA that begins at or before a part.
  M3_HOST_DEVICE int owner(int part) const {
    return ((part + 1) * ctas - 1) / all;
  }
};

// A list whose `both` first entries are for both warpgroups, then pairs of entries for one each,
// then `rest` for one of them. A pair takes as long as one entry for both: a step.
struct AttendListCut {
  int both, paired, rest;

  // First entry of a part.
  M3_HOST_DEVICE int entry(int part) const {
    const int step = (both + paired + rest) * part / kAttendTileParts;
    const int pairs = step - both;
    return step + (pairs < 0 ? 0 : pairs < paired ? pairs : paired);
  }
};

}  // namespace m3

#undef M3_HOST_DEVICE
