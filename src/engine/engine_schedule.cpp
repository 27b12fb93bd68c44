// Who runs, and what a step computes (serving.md §12).
#include <algorithm>

#include "engine/plan.h"

namespace m3 {

namespace {

constexpr int64_t kShortPrompt = 1024;  // so few tokens left: does not wait behind long prompts
constexpr int64_t kMaxPreemptions = 3;  // then a request is left alone as long as another can be taken

}  // namespace

// First come, first served: nobody passes a request that waits for pages, so that a large one keeps its place.
void Engine::admit() {
  bool blocked = false;
  for (size_t i = 0; i < waiting_.size();) {
    Sequence& next = *waiting_[i];
    next.wait_reason = blocked ? WaitReason::kBehindOthers : try_admit(next);
    if (next.wait_reason == WaitReason::kNone) {
      running_.push_back(std::move(waiting_[i]));
      waiting_.erase(waiting_.begin() + static_cast<int64_t>(i));
      continue;
    }
    blocked |= next.wait_reason != WaitReason::kSharedPrompt;
    ++i;
  }
}

bool Engine::prompt_is_open(RequestId id) const {
  const auto is_it = [id](const SequencePtr& sequence) { return sequence->id == id; };
  if (std::ranges::any_of(waiting_, is_it)) return true;
  const auto found = std::ranges::find_if(running_, is_it);
  return found != running_.end() && (*found)->num_answered() == 0;
}

// A request is admitted with the pages of all its tokens, so prompts never stop half way for lack of them; one page
// is left for each whose answer may need more. So as many run together as the memory plan says.
WaitReason Engine::try_admit(Sequence& sequence) {
  if (sequence.request.after_prompt_of != 0 && prompt_is_open(sequence.request.after_prompt_of)) {
    return WaitReason::kSharedPrompt;
  }
  const auto num_running = static_cast<int64_t>(running_.size());
  if (num_running >= model_.sizes().max_sequences) return WaitReason::kMaxSequences;
  const auto length = static_cast<int64_t>(sequence.tokens.size());
  // The last token is always computed: the next one is drawn from its row.
  const auto reusable = std::span(sequence.keys).first(length - 1);
  const PageCache::Match match = pages_.match(reusable);
  const int64_t wanted = pages_.pages_for(length) - match.full_pages;
  const auto may_grow = [this](const Sequence& s) {
    return pages_.pages_for(s.prompt_tokens + s.max_tokens) > pages_.pages_for(static_cast<int64_t>(s.tokens.size()));
  };
  int64_t reserve = may_grow(sequence);
  for (const SequencePtr& other : running_) reserve += may_grow(*other);
  if (wanted + reserve > pages_.num_available() - match.idle_pages) return WaitReason::kCachePages;

  sequence.num_cached =
      pages_.attach(sequence.pages, reusable, [&](int32_t from, int32_t to) { model_.copy_page(from, to); });
  M3_CHECK(pages_.grow(sequence.pages, length), "no pages for a request of {} tokens after admitting it", length);
  metrics_.prefix_queried_tokens += length;
  metrics_.prefix_hit_tokens += sequence.num_cached;
  if (!sequence.was_admitted) {
    sequence.was_admitted = true;
    sequence.admitted = EngineClock::now();
    sequence.timings.cached_tokens = sequence.num_cached;
    sequence.timings.queue_seconds = seconds_between(sequence.submitted, sequence.admitted);
    metrics_.queue_seconds.add(sequence.timings.queue_seconds);
  }
  return WaitReason::kNone;
}

// A page for the next token of each, if need be by preempting.
void Engine::make_room(std::span<Sequence* const> answering) {
  for (Sequence* sequence : answering) {
    while (!sequence->pages.ids.empty() && !pages_.grow(sequence->pages, sequence->num_cached + 1)) {
      preempt(pick_victim(*sequence));
    }
  }
}

// Whose loss is least, the newest of equals; the grower itself may be the one.
Engine::Sequence& Engine::pick_victim(Sequence& grower) {
  Sequence* victim = nullptr;
  for (const SequencePtr& candidate : running_) {
    if (candidate->timings.preemptions >= kMaxPreemptions) continue;
    if (victim == nullptr || candidate->num_cached <= victim->num_cached) victim = candidate.get();
  }
  if (victim == nullptr) victim = running_.back().get();  // all have been preempted often: the oldest goes on
  M3_CHECK(victim != &grower || running_.size() > 1, "a request of {} tokens alone needs more than all {} pages",
           grower.tokens.size(), pages_.num_pages());
  return *victim;
}

// Back to the head of the queue. What it computed stays in the prefix cache as long as nobody needs the pages.
void Engine::preempt(Sequence& sequence) {
  pages_.release(sequence.pages, sequence.computed());
  sequence.num_cached = 0;
  ++sequence.timings.preemptions;
  ++metrics_.preemptions;
  const auto it = std::ranges::find_if(running_, [&](const SequencePtr& s) { return s.get() == &sequence; });
  const auto place = std::ranges::find_if(
      waiting_, [&](const SequencePtr& s) { return s->timings.preemptions == 0 || s->id > sequence.id; });
  waiting_.insert(place, std::move(*it));
  running_.erase(it);
}

void Engine::plan_step() {
  plan_->clear();
  plan_answers();
  plan_prompts(options_.max_step_tokens - plan_->num_rows());
}

// Answers first, one token each and its draft.
void Engine::plan_answers() {
  std::vector<Sequence*> answering;
  for (const SequencePtr& sequence : running_) {
    if (sequence->is_answering()) answering.push_back(sequence.get());
  }
  make_room(answering);
  std::erase_if(answering, [](const Sequence* sequence) { return sequence->pages.ids.empty(); });

  const auto count = static_cast<int64_t>(answering.size());
  int64_t spare = std::min(options_.max_step_tokens, model_.sizes().max_logit_rows) - count;
  for (Sequence* sequence : answering) {
    sequence->draft.clear();
    if (options_.max_draft_tokens > 0) {
      const int64_t most = std::min({int64_t{options_.max_draft_tokens}, spare, sequence->max_tokens - sequence->num_answered() - 1});
      const auto draft = sequence->lookup.draft(sequence->tokens, most);
      if (pages_.grow(sequence->pages, sequence->num_cached + 1 + static_cast<int64_t>(draft.size()))) {
        sequence->draft.assign(draft.begin(), draft.end());
      }
    }
    const auto rows = 1 + static_cast<int64_t>(sequence->draft.size());
    spare -= rows - 1;
    add_part(*sequence, rows, rows);
  }
  plan_->has_answers = count > 0;
}

// Half of the rows are kept for prompts that are nearly done, in the order of arrival; long ones share the rest
// equally, so that all of them make progress. What one side does not need goes to the other.
void Engine::plan_prompts(int64_t budget) {
  std::vector<Sequence*> brief, lengthy;
  for (const SequencePtr& sequence : running_) {
    if (sequence->is_answering() || sequence->missing_media() != nullptr) continue;
    (sequence->num_pending() <= kShortPrompt ? brief : lengthy).push_back(sequence.get());
  }
  if (brief.empty() && lengthy.empty()) return;
  if (plan_->has_answers) budget = std::min(budget, rows_in_time());

  const auto add = [&](Sequence& sequence, int64_t rows) {
    const int page = pages_.page_tokens();
    if (rows < sequence.num_pending() && rows >= page) rows -= (sequence.num_cached + rows) % page;
    budget -= rows;
    if (rows > 0) add_part(sequence, rows, rows == sequence.num_pending() ? 1 : 0);
  };
  int64_t for_brief = lengthy.empty() ? budget : budget / 2, for_lengthy = budget;
  for (const Sequence* sequence : brief) for_lengthy -= std::min(sequence->num_pending(), for_lengthy);
  for_lengthy = std::max(for_lengthy, budget - for_brief);

  if (!lengthy.empty()) {
    std::rotate(lengthy.begin(), lengthy.begin() + static_cast<int64_t>(rotation_++ % lengthy.size()), lengthy.end());
  }
  for (size_t i = 0; i < lengthy.size() && for_lengthy > 0; ++i) {
    const auto left = static_cast<int64_t>(lengthy.size() - i);
    const int64_t share = std::min(std::max<int64_t>(for_lengthy / left, pages_.page_tokens()), for_lengthy);
    const int64_t before = budget;
    add(*lengthy[i], std::min(share, lengthy[i]->num_pending()));
    for_lengthy -= before - budget;
  }
  for (Sequence* sequence : brief) {
    if (budget == 0) return;
    add(*sequence, std::min(budget, sequence->num_pending()));
  }
}

// A step with answers in it keeps their readers waiting: so many rows of prompts are expected to take
// max_step_seconds.
int64_t Engine::rows_in_time() const {
  if (options_.max_step_seconds <= 0 || seconds_per_row_ <= 0) return options_.max_step_tokens;
  const double rows = std::min(options_.max_step_seconds / seconds_per_row_, static_cast<double>(options_.max_step_tokens));
  return std::max<int64_t>(static_cast<int64_t>(rows), pages_.page_tokens());
}

void Engine::add_part(Sequence& sequence, int64_t num_rows, int64_t num_logits) {
  Plan& plan = *plan_;
  const int64_t begin = sequence.num_cached, end = begin + num_rows, first_row = plan.num_rows();
  const auto from_tokens = std::min<int64_t>(num_rows, sequence.num_pending());
  plan.parts.push_back({&sequence, num_rows, num_logits, !sequence.is_answering()});
  plan.has_prompts |= plan.parts.back().is_prompt;
  plan.ids.insert(plan.ids.end(), sequence.tokens.begin() + begin, sequence.tokens.begin() + begin + from_tokens);
  plan.ids.insert(plan.ids.end(), sequence.draft.begin(), sequence.draft.begin() + (num_rows - from_tokens));
  plan.cu_q.push_back(static_cast<int32_t>(plan.ids.size()));
  plan.seq_lens.push_back(static_cast<int32_t>(end));
  plan.max_pages = std::max(plan.max_pages, static_cast<int64_t>(sequence.pages.ids.size()));
  for (int64_t i = num_rows - num_logits; i < num_rows; ++i) plan.logit_rows.push_back(static_cast<int32_t>(first_row + i));

  // Rows of media, in runs that lie together in one picture or clip.
  const std::vector<int32_t>& positions = sequence.placeholders.positions;
  size_t i = std::ranges::lower_bound(positions, begin) - positions.begin();
  auto item = sequence.media.begin();
  while (i < positions.size() && positions[i] < end) {
    const int64_t row = sequence.placeholders.order[i];
    while (row < item->first_row || row >= item->first_row + item->num_rows) {
      if (++item == sequence.media.end()) item = sequence.media.begin();
    }
    const auto piece_begin = static_cast<int64_t>(plan.feature_rows.size());
    const size_t first = i;
    while (i < positions.size() && positions[i] < end && sequence.placeholders.order[i] == row + static_cast<int64_t>(i - first) &&
           sequence.placeholders.order[i] < item->first_row + item->num_rows) {
      plan.feature_rows.push_back(static_cast<int32_t>(first_row + positions[i++] - begin));
    }
    const int64_t local = row - item->first_row;
    plan.pieces.push_back({piece_begin, static_cast<int64_t>(plan.feature_rows.size()),
                           item->features->features_MC.rows(local, local + static_cast<int64_t>(i - first))});
  }
}

void Engine::Plan::clear() {
  parts.clear();
  for (auto* list : {&ids, &cu_q, &seq_lens, &page_table, &logit_rows, &feature_rows}) list->clear();
  cu_q.push_back(0);
  pieces.clear();
  features.clear();
  max_pages = 0;
  has_answers = has_prompts = false;
}

StepInput Engine::Plan::input() {
  page_table.assign(parts.size() * max_pages, -1);
  for (size_t n = 0; n < parts.size(); ++n) {
    std::ranges::copy(parts[n].sequence->pages.ids, page_table.begin() + static_cast<int64_t>(n) * max_pages);
  }
  for (const Piece& piece : pieces) {
    features.push_back({std::span(feature_rows).subspan(piece.begin, piece.end - piece.begin), piece.features_MC});
  }
  StepInput input;
  input.ids_T = ids;
  input.cu_q = cu_q;
  input.seq_lens = seq_lens;
  input.page_table = page_table;
  input.max_pages = max_pages;
  input.features = features;
  input.logit_rows = logit_rows;
  return input;
}

}  // namespace m3
