// Takes each operation through its stages.
#include "network/transport/ordered_rma.hpp"

#include <algorithm>
#include <exception>
#include <list>
#include <new>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "core/base/error.hpp"
#include "core/base/first_count.hpp"

namespace hsgd {
namespace {

constexpr size_t kMostBytes = 1 << 30;  // of one write: MPI counts in int

class OrderedRma final : public Rma {
 public:
  explicit OrderedRma(std::unique_ptr<UnorderedWrites> writes)
      : Rma(false), writes_(std::move(writes)) {}

  Ticket post(const std::vector<Piece>& pieces, const Notification& notification) override {
    if (const auto why = failure(kAll)) throw Error(*why);
    size_t writes = 1;  // the version
    for (const Piece& piece : pieces) writes += (piece.bytes + kMostBytes - 1) / kMostBytes;
    Operation operation{notification, last_ticket_ + 1, {}, false};
    operation.open.reserve(writes);
    writes_->reserve(writes);
    open_.insert(operation.ticket);
    try {
      operations_.push_back(std::move(operation));
    } catch (...) {  // out of memory
      open_.erase(last_ticket_ + 1);
      throw;
    }
    start(operations_.back(), pieces);
    return ++last_ticket_;
  }

  void drive() override {
    if (failed_) return;
    try {
      writes_->sync();
      for (auto operation = operations_.begin(); operation != operations_.end();) {
        if (advance(*operation)) {
          open_.erase(operation->ticket);
          operation = operations_.erase(operation);
        } else {
          ++operation;
        }
      }
    } catch (const std::exception&) {
      fail();
    }
  }

  bool done(Ticket ticket) const override { return open_.count(ticket) == 0; }
  std::optional<Error> failure(int) const override {
    if (!failed_ || failure_) return failure_;
    return Error(HSGD_ERR_MEMORY, -1, "NotifiedWindow: out of memory in an earlier write");
  }
  bool close(const Deadline& deadline) noexcept override { return writes_->close(deadline); }

 private:
  struct Operation {
    Notification notification;
    Ticket ticket;
    std::vector<UnorderedWrites::Ticket> open;
    bool notifying;
  };

  void start(Operation& operation, const std::vector<Piece>& pieces) {
    try {
      for (const Piece& piece : pieces) {
        for (size_t begin = 0; begin < piece.bytes; begin += kMostBytes) {
          operation.open.push_back(writes_->put(
              operation.notification.target, static_cast<const std::byte*>(piece.data) + begin,
              std::min(kMostBytes, piece.bytes - begin), piece.offset + begin));
        }
      }
    } catch (...) {
      fail();
      throw;
    }
  }

  // Call it in a catch block: no operation continues after it.
  void fail() noexcept {
    failed_ = true;
    try {
      try {
        throw;
      } catch (const Error& error) {
        failure_ = error;
      } catch (const std::exception& error) {
        failure_.emplace(HSGD_ERR_SYSTEM, -1, error.what());
      }
    } catch (const std::bad_alloc&) {  // failure() makes the error
    }
  }

  // Advances the operation as far as possible now; returns true if it is complete.
  bool advance(Operation& operation) {
    const Notification& notification = operation.notification;
    auto& open = operation.open;
    open.erase(std::remove_if(open.begin(), open.end(),
                              [&](auto ticket) { return writes_->done(ticket); }),
               open.end());
    if (!open.empty()) return false;
    if (operation.notifying) {
      writes_->flush(notification.target);
      return true;
    }
    if (follows_same_slot(operation)) return false;
    // Keeps the target from seeing the version before the data.
    writes_->flush(notification.target);
    open.push_back(
        writes_->replace(notification.target, &notification.version, notification.offset));
    operation.notifying = true;
    return false;
  }

  // Returns true if an earlier operation writes the same slot: its version must not overwrite a
  // later one.
  bool follows_same_slot(const Operation& operation) const {
    for (const Operation& earlier : operations_) {
      if (earlier.ticket == operation.ticket) return false;
      if (earlier.notification.target == operation.notification.target &&
          earlier.notification.slot == operation.notification.slot) {
        return true;
      }
    }
    return false;
  }

  std::unique_ptr<UnorderedWrites> writes_;
  std::list<Operation> operations_;  // in posting order; addresses are stable
  std::set<Ticket> open_;            // their tickets
  Ticket last_ticket_ = first_count();
  bool failed_ = false;
  std::optional<Error> failure_;  // the first error; empty if out of memory
};

}  // namespace

std::unique_ptr<Rma> make_ordered_rma(std::unique_ptr<UnorderedWrites> writes) {
  return std::make_unique<OrderedRma>(std::move(writes));
}

}  // namespace hsgd
