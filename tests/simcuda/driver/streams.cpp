// The thread of a stream, and finding streams and events by their handles.
#include "streams.hpp"

#include <signal.h>

#include <algorithm>

#include "faults.hpp"

namespace simcuda {
namespace {

const auto kLegacy = reinterpret_cast<CUstream>(1);
const auto kPerThread = reinterpret_cast<CUstream>(2);

}  // namespace

void Mark::reach() {
  const std::lock_guard<std::mutex> lock(mutex_);
  reached_ = true;
  changed_.notify_all();
}

bool Mark::reached() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return reached_;
}

void Mark::wait() const {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return reached_; });
}

// The thread takes no signals: those are for the threads of the program.
std::shared_ptr<Stream> Stream::start(Context& context) {
  auto stream = std::make_shared<Stream>(context);
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread([stream] { stream->serve(); }).detach();
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return stream;
}

std::shared_ptr<Mark> Stream::push(Work work) {
  auto mark = std::make_shared<Mark>();
  const std::lock_guard<std::mutex> lock(mutex_);
  queue_.push_back(Piece{std::move(work), mark});
  last_ = mark;
  changed_.notify_one();
  return mark;
}

std::shared_ptr<Mark> Stream::last() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return last_;
}

void Stream::end() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ending_ = true;
  changed_.notify_one();
}

bool Stream::take(Piece* piece) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return ending_ || !queue_.empty(); });
  if (queue_.empty()) return false;
  *piece = std::move(queue_.front());
  queue_.pop_front();
  return true;
}

// What work holds is given back before its mark is reached: a call that waited sees no trace of it.
void Stream::serve() {
  for (Piece piece; take(&piece);) {
    if (!context_.failed()) {
      pause();
      const CUresult result = piece.work(context_);
      if (result != CUDA_SUCCESS) context_.fail(result);
    }
    piece.work = nullptr;
    piece.mark->reach();
  }
}

std::shared_ptr<Stream> Streams::create(Context& context) {
  auto stream = Stream::start(context);
  const std::lock_guard<std::mutex> lock(mutex_);
  created_[stream->handle()] = stream;
  count(&simcuda_counters::streams_live);
  return stream;
}

std::shared_ptr<Stream> Streams::remove(CUstream handle) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = created_.find(handle);
  if (found == created_.end()) return nullptr;
  auto stream = std::move(found->second);
  created_.erase(found);
  count(&simcuda_counters::streams_live, -1);
  const auto done = [](const auto& each) { return each.second->reached(); };
  leaving_.erase(std::remove_if(leaving_.begin(), leaving_.end(), done), leaving_.end());
  if (auto last = stream->last()) leaving_.emplace_back(&stream->context(), std::move(last));
  return stream;
}

std::shared_ptr<Stream> Streams::find(CUstream handle, Context& current) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (handle != nullptr && handle != kLegacy && handle != kPerThread) {
    const auto found = created_.find(handle);
    return found == created_.end() ? nullptr : found->second;
  }
  auto& stream = handle == kPerThread ? per_thread_[{&current, std::this_thread::get_id()}]
                                      : legacy_[&current];
  if (stream == nullptr) stream = Stream::start(current);
  return stream;
}

void Streams::synchronize(const Context& context) {
  std::vector<std::shared_ptr<Mark>> marks;
  const auto add = [&](const std::shared_ptr<Stream>& stream) {
    if (&stream->context() == &context) marks.push_back(stream->last());
  };
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& each : created_) add(each.second);
    for (const auto& each : legacy_) add(each.second);
    for (const auto& each : per_thread_) add(each.second);
    for (const auto& each : leaving_) {
      if (each.first == &context) marks.push_back(each.second);
    }
  }
  for (const auto& mark : marks) {
    if (mark != nullptr) mark->wait();
  }
}

CUevent Streams::add_event(Context& context) {
  std::shared_ptr<Event> event(new Event{context, {}, nullptr});
  const auto handle = reinterpret_cast<CUevent>(event.get());
  const std::lock_guard<std::mutex> lock(mutex_);
  events_[handle] = std::move(event);
  count(&simcuda_counters::events_live);
  return handle;
}

std::shared_ptr<Event> Streams::find_event(CUevent handle) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = events_.find(handle);
  return found == events_.end() ? nullptr : found->second;
}

bool Streams::remove_event(CUevent handle) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (events_.erase(handle) == 0) return false;
  count(&simcuda_counters::events_live, -1);
  return true;
}

Streams& streams() {
  static auto* one = new Streams;
  return *one;
}

bool& in_host_function() {
  thread_local bool inside = false;
  return inside;
}

}  // namespace simcuda
