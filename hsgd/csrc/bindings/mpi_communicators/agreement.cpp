// agree(): finds the rank with the worst failure, then sends its message to all.
#include "bindings/mpi_communicators/agreement.hpp"

#include <cstdint>
#include <cstdio>

namespace hsgd {
namespace {

void share(Steps steps, const std::optional<Error>& failure, const char* what) {
  const uint64_t code = failure ? static_cast<uint64_t>(-failure->code()) : 0;
  const auto last = static_cast<uint64_t>(steps.size() - 1);
  const auto own = last - static_cast<uint64_t>(steps.rank());
  const uint64_t worst = steps.greatest(code << 32 | own, what);
  if (worst >> 32 == 0) return;
  const auto rank = static_cast<int>(last - (worst & UINT32_MAX));
  char words[512] = {};
  if (failure) std::snprintf(words, sizeof words, "%s", failure->what());
  steps.broadcast(words, sizeof words, rank, "shared their errors");
  throw AgreedError(static_cast<hsgd_status>(-static_cast<int>(worst >> 32)),
                    steps.names().of(rank), words);
}

// Returns true if this rank lost another rank; the agreement would wait for that rank, too.
bool misses_a_rank(const Error& failure) {
  return failure.code() == HSGD_ERR_TIMEOUT || failure.code() == HSGD_ERR_PEER_LOST ||
         failure.code() == HSGD_ERR_INTERRUPTED;
}

}  // namespace

void agree(Steps& steps, const std::optional<Error>& failure, const char* what) {
  constexpr double kMissedS = 1.0;
  const bool brief = failure && misses_a_rank(*failure);
  try {
    share(brief ? steps.within(kMissedS) : steps, failure, what);
  } catch (const AgreedError&) {
    throw;
  } catch (const Error&) {
    if (failure) throw *failure;
    throw;
  }
}

}  // namespace hsgd
