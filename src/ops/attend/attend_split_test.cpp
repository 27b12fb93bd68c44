// The sharing out of split tiles: every part has one CTA, places are unique, cuts ascend.
#include "ops/attend/attend_split.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

namespace m3 {
namespace {

TEST(AttendSplit, every_part_has_one_cta_and_every_piece_its_own_place) {
  for (const int max_ctas : {1, 2, 78, 114, 132, 160}) {
    for (int units = 1; units <= kAttendMaxSplitUnits; units += units < 200 ? 1 : 107) {
      const AttendShares shares(units, max_ctas);
      std::vector<int> parts_done(units, 0), next_cta(units, -1);
      std::set<int> places;
      int longest = 0, part = 0;
      for (int cta = 0; cta < max_ctas; ++cta) {
        ASSERT_EQ(shares.begin(cta), part) << "no gap, no overlap";
        longest = std::max(longest, shares.begin(cta + 1) - part);
        for (const int end = shares.begin(cta + 1); part < end;) {
          const int unit = part / kAttendTileParts, first = part % kAttendTileParts;
          const int count = std::min(kAttendTileParts - first, end - part);
          if (next_cta[unit] < 0) next_cta[unit] = shares.owner(unit * kAttendTileParts);
          ASSERT_EQ(next_cta[unit]++, cta) << "the CTAs of a unit are consecutive";
          if (count < kAttendTileParts) {
            ASSERT_TRUE(places.insert(unit + cta).second);
            ASSERT_LT(unit + cta, units + max_ctas) << "inside the workspace";
          }
          parts_done[unit] += count;
          part += count;
        }
      }
      ASSERT_EQ(part, units * kAttendTileParts);
      for (int unit = 0; unit < units; ++unit) {
        ASSERT_EQ(parts_done[unit], kAttendTileParts);
        const int last = shares.owner((unit + 1) * kAttendTileParts - 1);
        ASSERT_LE(last - shares.owner(unit * kAttendTileParts) + 1, kAttendTileParts / 2 + 1);
        ASSERT_EQ(next_cta[unit] - 1, last);
      }
      const int fair = (units * kAttendTileParts + shares.ctas - 1) / shares.ctas;
      ASSERT_LE(longest, fair) << units << " units, " << max_ctas << " CTAs";
    }
  }
}

TEST(AttendSplit, cuts_of_a_list_ascend_and_cover_it) {
  for (int both = 0; both < 40; both += 3) {
    for (int paired = 0; paired < 40; paired += 3) {
      for (int rest = 0; rest < 20; rest += 3) {
        const AttendListCut cut = {both, paired, rest};
        const int steps = both + paired + rest;
        ASSERT_EQ(cut.entry(0), 0);
        ASSERT_EQ(cut.entry(kAttendTileParts), both + 2 * paired + rest);
        for (int part = 0; part < kAttendTileParts; ++part) {
          const int count = cut.entry(part + 1) - cut.entry(part);
          ASSERT_GE(count, steps / kAttendTileParts);
          ASSERT_LE(count, 2 * (steps / kAttendTileParts + 1)) << "at most two entries a step";
        }
      }
    }
  }
}

}  // namespace
}  // namespace m3
