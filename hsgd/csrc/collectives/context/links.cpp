// Links: creates the exchanges of a leader and tracks the nodes that have left.
#include "collectives/context/links.hpp"

#include <algorithm>

namespace hsgd {

HeaderExchange::Room header_room(const RoundSchedule& rounds, const StepSizes& sizes) {
  HeaderExchange::Room room;
  // Sums of 16-bit floats travel as float32 if there are several rounds.
  room.payload = (rounds.is_direct() ? 1 : 2) * sizes.oneshot_bytes();
  if (rounds.rounds() == 0) return room;
  room.whole = sizes.slice_bytes();
  const auto least_radix = static_cast<size_t>(rounds.radix(rounds.rounds() - 1));
  room.part = std::max(SliceAllreduce::most_part_bytes(rounds, room.whole),
                       room.whole / least_radix + StepSizes::kChunkUnit);
  return room;
}

Links::Links(std::unique_ptr<Transport> transport, const Place& place, const RoundSchedule& rounds,
             const StepSizes& sizes, const hsgd_options& options)
    : transport_(std::move(transport)) {
  if (transport_ == nullptr) return;
  messages_ = std::make_unique<StepMessages>(*transport_, options.slots, counters_);
  if (place.leads(sizes.most_leaders())) {
    slices_ =
        std::make_unique<SliceAllreduce>(*transport_, rounds, sizes.slice_bytes(), options.slots,
                                         options.wire_dtype != HSGD_FLOAT32, counters_);
  }
  blocks_ = std::make_unique<SliceAllgather>(*transport_, rounds, options.slots, counters_);
  copies_ = std::make_unique<SliceBroadcast>(*transport_, rounds, options.slots, counters_);
  trees_ = std::make_unique<TreeBroadcast>(*transport_, options.slots, counters_);
  if (!place.leads(1)) return;
  headers_ =
      std::make_unique<HeaderExchange>(*transport_, rounds, header_room(rounds, sizes), counters_);
}

BroadcastSteps* Links::copies(BroadcastForm form) {
  if (form == BroadcastForm::kTrees) return trees_.get();
  return copies_.get();
}

void Links::part(const Parting& parting) {
  if (transport_ != nullptr) transport_->part(parting);
}

const Parting* Links::parted(uint64_t sequence) {
  if (transport_ == nullptr) return nullptr;
  Parting heard;
  while (transport_->heard(&heard)) {
    if (!parting_ || heard.sequence < parting_->sequence) parting_ = heard;
  }
  return parting_ && parting_->sequence <= sequence ? &*parting_ : nullptr;
}

bool Links::quiesce(const Deadline& deadline) {
  return transport_ == nullptr || transport_->quiesce(deadline);
}

}  // namespace hsgd
