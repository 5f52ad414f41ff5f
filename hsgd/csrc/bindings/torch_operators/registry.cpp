// Registry: the map of communicators and its lock.
#include "bindings/torch_operators/registry.hpp"

#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>

namespace hsgd::operators {
namespace {

struct Registry {
  std::mutex lock;
  std::unordered_map<int64_t, std::shared_ptr<hsgd_comm>> comms;
};

// Never destroyed: a thread may be in an operator while the process ends.
Registry& registry() {
  static auto* const only = new Registry;
  return *only;
}

}  // namespace

std::shared_ptr<hsgd_comm> comm_of(int64_t number) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> held(all.lock);
  const auto found = all.comms.find(number);
  if (found != all.comms.end()) return found->second;
  throw std::runtime_error("torch.ops.hsgd: no open communicator has the number " +
                           std::to_string(number) + "; take it from hsgd.operators.group(comm)");
}

}  // namespace hsgd::operators

int hsgd_operators_keep(int64_t number, const void* comm) {
  auto& all = hsgd::operators::registry();
  try {
    const std::lock_guard<std::mutex> held(all.lock);
    all.comms[number] = *static_cast<const std::shared_ptr<hsgd_comm>*>(comm);
    return 0;
  } catch (const std::exception&) {
    return -1;
  }
}

void hsgd_operators_forget(int64_t number) {
  auto& all = hsgd::operators::registry();
  std::shared_ptr<hsgd_comm> last;  // destroyed after the lock is released
  const std::lock_guard<std::mutex> held(all.lock);
  const auto found = all.comms.find(number);
  if (found == all.comms.end()) return;
  last = std::move(found->second);
  all.comms.erase(found);
}
