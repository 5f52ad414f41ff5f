// Packs, hashes and describes signatures.
#include "core/base/call_signature.hpp"

#include <algorithm>
#include <cstring>

namespace hsgd {
namespace {

// FNV-1a (Fowler, Noll, Vo): short, and good enough to tell calls of one program apart.
uint32_t mix(uint32_t hash, const void* data, size_t bytes) {
  const auto* byte = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ byte[i]) * 16777619u;
  return hash;
}

// The name of a kind in error texts, and which arguments its calls have.
struct Words {
  const char* name;
  bool has_op = false;
  bool has_root = false;
  bool has_payload = true;
};

const Words& words_of(hsgd_kind kind) {
  static constexpr Words kWords[] = {
      {"allreduce", true},
      {"broadcast", false, true},
      {"barrier", false, false, false},
      {"reduce_scatter", true},
      {"allgather"},
      {"alltoall"},
      {"allgather"},  // of rows, and the next: ranks compare the collectives inside them
      {"alltoall"},
      {"empty"},
  };
  static_assert(sizeof kWords / sizeof *kWords == kAllocate + 1 && kAllocate < 15, "one each");
  return kWords[std::min<size_t>(kind, kAllocate)];
}

const char* kind_name(const Signature& signature) {
  const bool shared = signature.kind() == kAllocate && signature.root() != 0;
  return shared ? "shared" : words_of(signature.kind()).name;
}

std::string quoted_name(const Label& label) {
  if (label.name_given == 0) return "";
  return std::string(" \"") + label.name + "\"";
}

std::string shape_text(const Label& label) {
  std::string shape = "(";
  for (int i = 0; i < std::min<int>(label.ndim, Label::kMaxDimensions); ++i) {
    shape += label.shape[i] < 0 ? ":" : std::to_string(label.shape[i]);
    shape += (i + 1 < label.ndim || label.ndim == 1 ? "," : "");
    if (i + 1 < label.ndim) shape += " ";
  }
  return shape + (label.ndim > Label::kMaxDimensions ? "...)" : ")");
}

std::string counts_text(const Label& label) {
  std::string counts = "(";
  const int shown = std::min(label.ranks, Label::kMostCounts);
  for (int i = 0; i < shown; ++i) {
    counts += (i > 0 ? " " : "") + std::to_string(label.counts[i]);
    counts += i + 1 < label.ranks || label.ranks == 1 ? "," : "";
  }
  return counts + (shown < label.ranks ? " ...)" : ")");
}

// Returns true if rows may differ between ranks: then the shape says more than the count.
bool is_ragged(const Call& call) {
  return call.signature.kind() == HSGD_ALLTOALL ||
         (call.signature.kind() == HSGD_ALLGATHER && call.label.ndim > 0);
}

std::string payload_text(const Call& call, bool with_shape) {
  const Signature& signature = call.signature;
  if (!words_of(signature.kind()).has_payload) return "nothing";
  std::string text = is_ragged(call) ? "" : std::to_string(signature.count) + " ";
  text += hsgd_dtype_name(signature.dtype());
  if (with_shape && call.label.ndim >= 0) text += " of shape " + shape_text(call.label);
  return text;
}

const char* verb(hsgd_kind kind) { return kind == kAllocate ? " asked for " : " sent "; }

std::string call_text(const Call& call, const RankNames& names) {
  const Signature& signature = call.signature;
  std::string text = kind_name(signature) + quoted_name(call.label);
  const Words& words = words_of(signature.kind());
  if (!words.has_payload) return text;
  text += " of " + payload_text(call, true);
  if (words.has_op) text += std::string(", ") + hsgd_op_name(signature.op());
  if (words.has_root) text += ", root " + std::to_string(names.of(signature.root()));
  return text;
}

}  // namespace

Signature Signature::pack(hsgd_kind kind, hsgd_dtype dtype, hsgd_op op, int root, uint64_t count,
                          uint32_t label_hash) {
  Signature signature;
  signature.word = (static_cast<uint64_t>(kind) + 1) | static_cast<uint64_t>(dtype) << 4 |
                   static_cast<uint64_t>(op) << 8 | static_cast<uint64_t>(root) << 12 |
                   static_cast<uint64_t>(label_hash) << 32;
  signature.count = count;
  return signature;
}

uint64_t mix_count(uint64_t from, uint64_t to, uint64_t count) {
  // The finalizer of SplitMix64 (Steele, Lea and Flood 2014), twice.
  const auto mixed = [](uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  };
  return mixed(mixed(from << 32 | to) + 0x9e3779b97f4a7c15u + count);
}

uint32_t hash_label(const hsgd_label* label, const Counts& counts) {
  uint64_t sum = 0;
  for (int rank = 0; rank < counts.ranks; ++rank) {
    sum += mix_count(0, static_cast<uint64_t>(rank), counts.of_rank[rank]);
  }
  const auto folded = static_cast<uint32_t>(sum ^ sum >> 32);
  if (label == nullptr) return folded;
  uint32_t hash = 2166136261u ^ folded;
  if (label->shape != nullptr) {
    hash = mix(hash, label->shape, sizeof(int64_t) * static_cast<size_t>(label->ndim));
  }
  if (label->name != nullptr) hash = mix(hash, label->name, std::strlen(label->name) + 1);
  return hash;
}

void fill_label(const hsgd_label* label, const Counts& counts, Label* out) {
  out->ndim = -1;
  out->name_given = 0;
  out->name[0] = '\0';
  out->ranks = counts.ranks;
  std::copy_n(counts.of_rank, std::min(counts.ranks, Label::kMostCounts), out->counts);
  if (label == nullptr) return;
  if (label->shape != nullptr) {
    out->ndim = static_cast<int16_t>(label->ndim);
    std::copy_n(label->shape, std::min<int>(label->ndim, Label::kMaxDimensions), out->shape);
  }
  if (label->name != nullptr) {
    out->name_given = 1;
    std::strncpy(out->name, label->name, sizeof out->name - 1);
    out->name[sizeof out->name - 1] = '\0';
  }
}

hsgd_side side_of(int rank, const Label& label) {
  hsgd_side side{rank, label.name_given, {}};
  static_assert(sizeof side.name == sizeof label.name);
  std::memcpy(side.name, label.name, sizeof side.name);
  return side;
}

std::string describe_call(uint64_t sequence, const Signature& signature, const hsgd_label* label) {
  Label shown;
  fill_label(label, {}, &shown);
  return std::string(kind_name(signature)) + " #" + std::to_string(sequence) + quoted_name(shown);
}

std::string describe_mismatch(uint64_t sequence, const Call& one, const Call& other,
                              const RankNames& names) {
  const Signature& a = one.signature;
  const Signature& b = other.signature;
  const bool same_name = quoted_name(one.label) == quoted_name(other.label);
  const bool same_call =
      a.kind() == b.kind() && same_name && a.op() == b.op() && a.root() == b.root();
  if (!same_call) {
    return "collective #" + std::to_string(sequence) + ": rank " + std::to_string(one.rank) +
           " called " + call_text(one, names) + "; rank " + std::to_string(other.rank) +
           " called " + call_text(other, names) +
           "; make the same calls in the same order on every rank";
  }
  const bool blocks_say_it = payload_text(one, true) == payload_text(other, true);
  if (blocks_say_it && counts_text(one.label) == counts_text(other.label)) {  // the rest is cut off
    return describe_call(sequence, a) + quoted_name(one.label) + ": rank " +
           std::to_string(one.rank) + " and rank " + std::to_string(other.rank) + verb(a.kind()) +
           payload_text(one, true) +
           ", but names, shapes or blocks differ beyond the 63 characters, 7 extents and 8 blocks "
           "shown; call it with the same ones on every rank";
  }
  const bool count_says_it = !is_ragged(one) && a.count != b.count;
  const auto text_of = [&](const Call& call) {
    std::string text =
        verb(a.kind()) + payload_text(call, !count_says_it && a.dtype() == b.dtype());
    return blocks_say_it ? text + " in blocks of " + counts_text(call.label) : text;
  };
  return describe_call(sequence, a) + quoted_name(one.label) + ": rank " +
         std::to_string(one.rank) + text_of(one) + ", rank " + std::to_string(other.rank) +
         text_of(other) + "; call it with the same " +
         (blocks_say_it    ? "counts"
          : is_ragged(one) ? "dtype and extents"
                           : "shape and dtype") +
         " on every rank";
}

}  // namespace hsgd
