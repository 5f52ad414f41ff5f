// ChunkPipeline: the state machine of all large collectives.
#include "collectives/kinds/chunk_pipeline.hpp"

#include <algorithm>

#include "collectives/kinds/zero_copy.hpp"
#include "core/base/fault_points.hpp"

namespace hsgd {

Chunking::Chunking(uint64_t count, size_t element_bytes, size_t chunk_bytes) : count(count) {
  if (count == 0) return;
  const uint64_t most = chunk_bytes / element_bytes;
  steps = (count + most - 1) / most;
  // Equal steps in whole cache lines; `most` is a multiple of a line.
  elements = std::min(most, round_up((count + steps - 1) / steps, kLine));
  steps = (count + elements - 1) / elements;
}

Range Chunking::chunk(uint64_t step) const {
  return {step * elements, std::min(count, (step + 1) * elements)};
}

// Opens the collective. The first step is staged before the other ranks see this rank's header, so
// that they need not wait for it later.
void ChunkPipeline::open(const Operation& operation) {
  if (context_.is_open()) return;
  context_.wait_until([&] { return stage_first(); });
  open_in_private(context_, operation);
}

void ChunkPipeline::run(const Operation& operation) {
  open(operation);
  Permission granted = Permission::kUnknown;
  const FirstStepFn first = [&] { return first_step(); };
  context_.wait([&] {
    if (granted != Permission::kGranted) granted = context_.permission(first);
    return step(granted);
  });
  HSGD_FAULT_POINT("pipeline: through");
  context_.finish_steps(stages_.steps);
}

void ChunkPipeline::run_on_node(const Operation& operation) {
  open(operation);
  context_.wait(
      [&] { return step(context_.headers_open() ? Permission::kGranted : Permission::kUnknown); });
  context_.finish_steps(stages_.steps);
}

bool ChunkPipeline::stage_first() {
  return stages_.staging == Stages::Staging::kNothing || staged_ > 0 ||
         try_stage(Permission::kUnknown);
}

// Returns the first step once it is reduced. Headers between nodes wait for it, which saves a round
// trip.
std::optional<RoundPayload*> ChunkPipeline::first_step() {
  if (!stages_.rides) return nullptr;
  if (!may_exchange(0)) return std::nullopt;
  RoundPayload* payload = stages_.window->with_headers();
  if (payload != nullptr) begin_exchange(0);
  return payload;
}

// Does one piece of work. A rank reduces only the first step before other nodes agree; after that
// all ranks of the node have done so.
Step ChunkPipeline::step(Permission permission) {
  hsgd_record* record = context_.record();
  bool moved = at_level(record, &hsgd_record::reduce, [&] { return try_stage(permission); });
  const bool reduces = permission == Permission::kGranted ||
                       (permission == Permission::kOnNode && stages_.leaders > 0 && reduced_ == 0);
  if (stages_.reduces && reduces) {
    moved |= at_level(record, &hsgd_record::reduce, [&] { return try_reduce(); });
  }
  if (permission == Permission::kGranted) {
    if (stages_.window != nullptr) {
      moved |= at_level(record, &hsgd_record::inter, [&] { return try_exchange(); });
    }
    if (stages_.gathers) {
      moved |= at_level(record, &hsgd_record::gather, [&] { return try_gather(); });
    }
    if (is_done()) return Step::kDone;
  }
  return moved ? Step::kProgress : Step::kIdle;
}

bool ChunkPipeline::is_done() const {
  const uint64_t last = stages_.gathers ? gathered_ : stages_.reduces ? reduced_ : staged_;
  return last == stages_.steps && (stages_.window == nullptr || exchanged_ == stages_.steps);
}

// --- stage ---

// Returns true if the slot is free: all ranks of the node have read the step that it held. They
// read it to reduce it, or gather it after all leaders have sent it.
bool ChunkPipeline::may_stage(uint64_t step) const {
  // One step ahead keeps the ring in cache; between nodes the link is slower than any cache.
  const uint64_t ahead = stages_.leaders == 0 ? 2 : context_.slots();
  if (step >= (stages_.reduces ? reduced_ : gathered_) + ahead) return false;
  if (!stages_.reduces || stages_.sums_in_ring()) {
    return step < gathered_ + context_.slots() && peers_freed(&Progress::gathered, step) &&
           earlier_is_sent(step);
  }
  return peers_freed(&Progress::reduced, step) && earlier_is_gathered(step) &&
         earlier_is_sent(step);
}

// Checks for sums that an earlier collective left in the slot.
bool ChunkPipeline::earlier_is_gathered(uint64_t step) const {
  const uint64_t base = context_.base();
  return local().peers_reached(&Progress::gathered, std::min(base, held_before(step)));
}

uint64_t ChunkPipeline::held_before(uint64_t step) const {
  const uint64_t end = context_.base() + step + 1;
  return end > context_.slots() ? end - context_.slots() : 0;
}

// Checks the leaders as well, because a rank that has copied a step may not have sent it yet.
bool ChunkPipeline::earlier_is_sent(uint64_t step) const {
  const uint64_t held = std::min(context_.base(), held_before(step));
  for (const int leader : context_.place().leader_ranks) {
    if (!local().rank_reached(leader, &Progress::exchanged, held)) return false;
  }
  return true;
}

bool ChunkPipeline::leaders_reached(uint64_t step) const {
  for (int lane = 0; lane < stages_.leaders; ++lane) {
    if (!rank_reached(leader(lane), &Progress::exchanged, step)) return false;
  }
  return true;
}

bool ChunkPipeline::try_stage(Permission permission) {
  if (staged_ == stages_.steps || stages_.staging == Stages::Staging::kNothing) return false;
  if (stages_.staging == Stages::Staging::kInReach) {
    staged_ = stages_.steps;
    publish(&Progress::staged, staged_);
    return true;
  }
  if (!may_stage(staged_)) return false;
  stage(staged_, in_slot(local().rank(), staged_), permission);
  HSGD_FAULT_POINT("pipeline: staged, not told");
  using Audience = LocalGroup::Audience;
  publish(&Progress::staged, ++staged_, is_root() ? Audience::kEach : Audience::kAll);
  if (is_root()) publish(&Progress::gathered, staged_);
  HSGD_FAULT_POINT("pipeline: staged");
  return true;
}

// --- reduce ---

bool ChunkPipeline::try_reduce() {
  if (reduced_ == staged_ || !peers_reached(&Progress::staged, reduced_)) return false;
  // The out slot held an earlier step, which all ranks must have gathered.
  if (stages_.gathers && !stages_.sums_in_ring()) {
    if (reduced_ >= gathered_ + context_.slots()) return false;
    if (!peers_freed(&Progress::gathered, reduced_)) return false;
  }
  reduce(reduced_);
  HSGD_FAULT_POINT("pipeline: reduced, not told");
  publish(&Progress::reduced, ++reduced_);
  HSGD_FAULT_POINT("pipeline: reduced");
  return true;
}

// --- exchange between nodes ---

// Returns true if the data is ready on all ranks and all ranks have gathered the step that arriving
// data overwrites; ranks that reduce have already checked the latter.
bool ChunkPipeline::may_exchange(uint64_t step) const {
  if (stages_.reduces) return step < reduced_ && peers_reached(&Progress::reduced, step);
  return step < staged_ && peers_reached(&Progress::staged, step) &&
         peers_freed(&Progress::gathered, step);
}

bool ChunkPipeline::try_exchange() {
  bool moved = false;
  StepWindow& window = *stages_.window;
  while (window.begun() < stages_.steps && may_exchange(window.begun())) {
    begin_exchange(window.begun());
    moved = true;
  }
  moved |= window.progress();
  while (exchanged_ < window.finished()) {
    end_exchange(exchanged_);
    publish(&Progress::exchanged, ++exchanged_, LocalGroup::Audience::kEach);
  }
  return moved;
}

// --- gather ---

bool ChunkPipeline::may_gather(uint64_t step) const {
  if (step >= (stages_.reduces ? reduced_ : staged_)) return false;
  if (!stages_.reduces && !peers_reached(&Progress::staged, step)) return false;
  if (stages_.leaders == 0) return !stages_.reduces || peers_reached(&Progress::reduced, step);
  return leaders_reached(step);
}

bool ChunkPipeline::try_gather() {
  if (gathered_ == stages_.steps || !may_gather(gathered_)) return false;
  gather(gathered_);
  HSGD_FAULT_POINT("pipeline: gathered, not told");
  publish(&Progress::gathered, ++gathered_);
  HSGD_FAULT_POINT("pipeline: gathered");
  return true;
}

}  // namespace hsgd
