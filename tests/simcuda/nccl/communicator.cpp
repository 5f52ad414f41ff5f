// Turns, and waiting for them.
#include "communicator.hpp"

#include <chrono>

namespace simnccl {
namespace {

// How often a waiting turn looks whether the context failed, of which nobody tells it.
constexpr auto kGlance = std::chrono::milliseconds(1);

}  // namespace

Communicator::Communicator(simcuda::Context& context, int rank, int size, int fd)
    : context_(context), rank_(rank), size_(size), region_(fd, size) {
  context_.retain();
}

Communicator::~Communicator() { context_.release(); }

void Communicator::abort() {
  std::unique_lock<std::mutex> lock(mutex_);
  aborted_.store(true, std::memory_order_release);
  changed_.notify_all();
  changed_.wait(lock, [this] { return running_ == 0; });
}

void Communicator::drain() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return turns_.empty(); });
}

Turn::Turn(std::shared_ptr<Communicator> comm) : comm_(std::move(comm)) {
  const std::lock_guard<std::mutex> lock(comm_->mutex_);
  number_ = comm_->next_turn_++;
  comm_->turns_.insert(number_);
}

Turn::~Turn() {
  const std::lock_guard<std::mutex> lock(comm_->mutex_);
  comm_->turns_.erase(number_);
  comm_->changed_.notify_all();
}

bool Turn::begin() {
  std::unique_lock<std::mutex> lock(comm_->mutex_);
  const auto first = [this] { return *comm_->turns_.begin() == number_; };
  while (!comm_->stopped() && !first()) comm_->changed_.wait_for(lock, kGlance);
  if (comm_->stopped()) return false;
  ++comm_->running_;
  return true;
}

void Turn::end() {
  const std::lock_guard<std::mutex> lock(comm_->mutex_);
  --comm_->running_;
  comm_->changed_.notify_all();
}

void Communicators::add(const std::shared_ptr<Communicator>& comm) {
  const std::lock_guard<std::mutex> lock(mutex_);
  live_[comm->handle()] = comm;
}

std::shared_ptr<Communicator> Communicators::find(ncclComm_t handle) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = live_.find(handle);
  return found == live_.end() ? nullptr : found->second;
}

void Communicators::remove(ncclComm_t handle) {
  const std::lock_guard<std::mutex> lock(mutex_);
  live_.erase(handle);
}

int Communicators::live() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int>(live_.size());
}

Communicators& communicators() {
  static auto* one = new Communicators;
  return *one;
}

}  // namespace simnccl
