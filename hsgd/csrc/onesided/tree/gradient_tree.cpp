// Tree: the work of a rank in the two trees.
#include "onesided/tree/gradient_tree.hpp"

#include <pthread.h>

#include <algorithm>
#include <cstring>

#include "core/base/error.hpp"
#include "core/os/sched_slice.hpp"

namespace hsgd {
namespace {

constexpr uint32_t kNobody = UINT32_MAX;
// The window of parcels in flight. A network that keeps the order of parcels gets all of them at
// once. On other networks a parcel in flight cannot be overtaken by one that the next forward pass
// needs sooner, so a parcel should arrive within kSlowNs; the window doubles if the link was idle
// between two looks. It has a lower bound: on a busy core this thread may look some milliseconds
// late, and with one parcel of 256 KB at a time a step took three times as long.
constexpr uint64_t kLeastWindow = 4 << 20;
constexpr uint64_t kMostWindow = 64 << 20;
constexpr int64_t kSlowNs = 50'000'000;
constexpr size_t kMostNoted = 1024;
constexpr size_t kMostFlights = 16;  // to one target; the NotifiedWindow limits the sum over all

}  // namespace

Tree::Tree(NotifiedWindow& window, Settings settings)
    : window_(window),
      settings_(std::move(settings)),
      index_of_slot_(window.settings().slots, kNobody),
      gathered_(settings_.layers.size()),
      arrived_(settings_.layers.size()) {
  if (settings_.layers.empty()) throw_invalid("Tree: there are no layers");
  seen_.push_back({settings_.stop_slot, 0});
  watched_.push_back({kNobody, false});
  for (uint32_t index = 0; index < settings_.layers.size(); ++index) {
    const Layer& layer = settings_.layers[index];
    if (layer.gradients.empty() || layer.gradients.size() > INT32_MAX) {
      throw_invalid("Tree: layer %u has no gradient", index);
    }
    for (const Numbers& numbers : layer.numbers) {
      if (hsgd_dtype_bytes(numbers.dtype) != 0) continue;
      throw_invalid("Tree: layer %u: dtype %d is unknown", index, static_cast<int>(numbers.dtype));
    }
    if (!layer.up.empty()) watch(index, layer.weights, true);
    for (const Input& input : layer.gradients) watch(index, input, false);
    for (const auto& outputs : {layer.up, layer.down}) {
      for (const Output& output : outputs) {
        if (std::find(targets_.begin(), targets_.end(), output.target) != targets_.end()) continue;
        targets_.push_back(output.target);
        lanes_.push_back({{}, {}, 0, kLeastWindow});
      }
    }
  }
}

void Tree::watch(uint32_t layer, const Input& input, bool weights) {
  if (input.slot >= index_of_slot_.size() || window_.segment(input.memory) == nullptr) {
    const int name = window_.name(input.memory);
    throw_error(HSGD_ERR_ARGUMENT, name,
                "Tree: layer %u: slot %u, or the memory of rank %d, cannot be reached here", layer,
                input.slot, name);
  }
  index_of_slot_[input.slot] = static_cast<uint32_t>(seen_.size());
  seen_.push_back({input.slot, 0});
  watched_.push_back({layer, weights});
}

void Tree::run(const Update& update) {
  struct Working {
    NotifiedWindow& window;
    explicit Working(NotifiedWindow& e) : window(e) { window.set_worked(true); }
    ~Working() { window.set_worked(false); }
  };
  const Working working(window_);
  ask_for_short_turns();
  ::pthread_setname_np(::pthread_self(), "hsgd-tree");
  bool stops = false;
  while (!stops || has_parcels()) {
    const auto seen = window_.work_any(seen_, [&] { return has_landed(); }, calm());
    if (seen.version >= settings_.given_up) throw Error(HSGD_ERR_PEER_LOST, -1, reason());
    if (seen.slot == settings_.stop_slot) {
      stops = true;  // but first send the data that others wait for
      seen_.front().version = seen.version;
    } else if (seen.slot != NotifiedWindow::kNoSlot) {
      take(seen, update);
    }
    send_all();
  }
  window_.drain(window_.settings().timeout_s);
}

void Tree::take(const NotifiedWindow::Seen& seen, const Update& update) {
  const uint32_t index = index_of_slot_[seen.slot];
  const Watched& watched = watched_[index];
  seen_[index].version = seen.version;
  if (!watched.weights) return gather(watched.layer, update);
  pass_on(watched.layer, seen.version);
  window_.wake();  // MPI delivered them, which rings no bell
}

std::string Tree::reason() const {
  const Input& own = settings_.layers.front().gradients.front();
  const auto* words = reinterpret_cast<const char*>(window_.segment(own.memory));
  const std::string told = foreign_words(words, settings_.reason_bytes);
  return told.empty() ? "another rank gave up" : told;
}

// --- gradients ---

void Tree::gather(uint32_t layer, const Update& update) {
  const uint64_t version = gathered_[layer] + 1;
  const Layer& own_layer = settings_.layers[layer];
  for (const Input& input : own_layer.gradients) {
    if (version_at(input.slot) < version) return;
  }
  gathered_[layer] = version;
  const bool ends_here = own_layer.up.empty();
  sum_up(own_layer, ends_here ? settings_.divisor : 1.0);
  if (ends_here) return make_weights(layer, version, update);
  for (const Output& output : own_layer.up)
    post(layer, version, output, block(own_layer.gradients.front()));
}

void Tree::sum_up(const Layer& layer, double divisor) const {
  std::vector<std::byte*> blocks;
  for (const Input& input : layer.gradients) blocks.push_back(block(input));
  std::byte* flags = blocks.front();
  for (size_t other = 1; other < blocks.size(); ++other) {
    for (uint32_t flag = 0; flag < layer.flags; ++flag) flags[flag] |= blocks[other][flag];
  }
  std::vector<const void*> inputs(blocks.size());
  for (const Numbers& numbers : layer.numbers) {
    for (size_t i = 0; i < blocks.size(); ++i) inputs[i] = blocks[i] + numbers.place;
    ReduceArgs args{};
    args.inputs = inputs.data();
    args.input_count = static_cast<int>(inputs.size());
    args.out = blocks.front() + numbers.place;
    args.count = numbers.count;
    args.divisor = divisor;
    if (args.input_count == 1 && divisor == 1.0) continue;
    select_reduce(numbers.dtype, HSGD_SUM, isa_)(args);
  }
}

void Tree::make_weights(uint32_t layer, uint64_t version, const Update& update) {
  if (!settings_.whole_step && update_elements(layer, version)) return pass_on(layer, version);
  held_.push_back(layer);
  if (settings_.whole_step && held_.size() < settings_.layers.size()) return;
  std::vector<uint32_t> made;
  made.swap(held_);
  std::sort(made.begin(), made.end());
  update(version, made);
  for (const uint32_t each : made) pass_on(each, version);
}

// Updates the weights. Returns false, having done nothing, if that needs the program.
bool Tree::update_elements(uint32_t layer, uint64_t version) {
  const Layer& own_layer = settings_.layers[layer];
  const std::byte* sum = block(own_layer.gradients.front());
  std::vector<ElementUpdate::Gradient> gradients;
  for (size_t i = 0; i < own_layer.numbers.size(); ++i) {
    const Numbers& numbers = own_layer.numbers[i];
    if (numbers.dtype != HSGD_FLOAT32) return false;
    const bool there = i >= own_layer.flags || sum[i] != std::byte{0};
    const auto* first = reinterpret_cast<const float*>(sum + numbers.place);
    gradients.push_back({there ? first : nullptr, numbers.count});
  }
  return elements_.update(version, layer, gradients);
}

void Tree::pass_on(uint32_t layer, uint64_t version) {
  arrived_[layer] = version;
  const Layer& own_layer = settings_.layers[layer];
  for (const Output& output : own_layer.down)
    post(layer, version, output, block(own_layer.weights));
}

// --- sending ---

void Tree::post(uint32_t layer, uint64_t version, const Output& output, const std::byte* data) {
  const auto lane = std::find(targets_.begin(), targets_.end(), output.target) - targets_.begin();
  lanes_[static_cast<size_t>(lane)].parcels.push_back({layer, version, &output, data});
}

void Tree::send_all() {
  for (Lane& lane : lanes_) {
    land(lane);
    while (send_from(lane)) {
    }
  }
}

bool Tree::has_parcels() const {
  return std::any_of(lanes_.begin(), lanes_.end(),
                     [](const Lane& lane) { return !lane.parcels.empty(); });
}

bool Tree::has_room(const Lane& lane) const {
  if (lane.flights.empty() || window_.keeps_order()) return true;
  return lane.flights.size() < kMostFlights && lane.flying_bytes < lane.window_bytes;
}

// Sends the parcel that is needed first, if the lane has room.
bool Tree::send_from(Lane& lane) {
  if (lane.parcels.empty() || !has_room(lane)) return false;
  const auto first =
      std::min_element(lane.parcels.begin(), lane.parcels.end(),
                       [](const Parcel& a, const Parcel& b) { return a.layer < b.layer; });
  const Parcel parcel = *first;
  lane.parcels.erase(first);
  const Output& output = *parcel.output;
  std::vector<Piece> pieces;
  if (output.bytes > 0) pieces.push_back({parcel.data, output.bytes, output.offset});
  if (before_notify_) before_notify_();
  const uint64_t ticket = window_.put_notify(pieces, output.target, output.slot, parcel.version,
                                             window_.settings().timeout_s, parcel.layer);
  if (ticket == 0) return true;
  lane.flights.push_back({ticket, output.bytes, {parcel.layer, output.target, now_ns(), 0}});
  lane.flying_bytes += output.bytes;
  return true;
}

// Records which parcels have arrived and how long they took. Later parcels may arrive first.
void Tree::land(Lane& lane) {
  if (lane.flights.empty()) return;
  const auto landed = [&](Flight& flight) {
    if (!window_.delivered(flight.ticket)) return false;
    flight.sent.end_ns = now_ns();
    lane.flying_bytes -= flight.bytes;
    if (flight.sent.end_ns - flight.sent.begin_ns > kSlowNs) {
      lane.window_bytes = std::max(lane.window_bytes / 2, kLeastWindow);
    }
    note(flight.sent);
    return true;
  };
  auto& flights = lane.flights;
  flights.erase(std::remove_if(flights.begin(), flights.end(), landed), flights.end());
  if (flights.empty()) lane.window_bytes = std::min(2 * lane.window_bytes, kMostWindow);
}

void Tree::note(const Sent& sent) {
  const std::lock_guard<std::mutex> lock(sent_mutex_);
  if (sent_.size() == kMostNoted) sent_.pop_front();
  sent_.push_back(sent);
}

std::vector<Tree::Sent> Tree::sent() const {
  const std::lock_guard<std::mutex> lock(sent_mutex_);
  return {sent_.begin(), sent_.end()};
}

bool Tree::has_landed() {
  return std::any_of(lanes_.begin(), lanes_.end(), [&](const Lane& lane) {
    return std::any_of(lane.flights.begin(), lane.flights.end(),
                       [&](const Flight& flight) { return window_.delivered(flight.ticket); });
  });
}

// Returns true if all weights of the last step have arrived and been passed on, and no gradient of
// the next one has arrived.
bool Tree::calm() const {
  const bool idle = std::all_of(lanes_.begin(), lanes_.end(), [](const Lane& lane) {
    return lane.parcels.empty() && lane.flights.empty();
  });
  return idle && gathered_ == arrived_ &&
         std::all_of(settings_.layers.begin(), settings_.layers.end(), [&](const Layer& layer) {
           const uint32_t own = layer.gradients.front().slot;
           return version_at(own) ==
                  arrived_[static_cast<size_t>(&layer - settings_.layers.data())];
         });
}

uint64_t Tree::version_at(uint32_t slot) const { return seen_[index_of_slot_[slot]].version; }

std::byte* Tree::block(const Input& input) const {
  return window_.segment(input.memory) + input.offset;
}

}  // namespace hsgd
