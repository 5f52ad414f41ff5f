// hsgd_io_find_arrays(): reads where the arrays of many groups lie from the headers of HDF5
// objects.
//
// Does not interpret the types of arrays: their headers must be equal to one that HDF5 has read.
// Anything unusual is left to HDF5, and so is a file of which HDF5 might say something else. Never
// allocates and never throws; keeps less than 100 KB on the stack. Source: HDF5 File Format
// Specification 3.0, sections III.A.1 and IV.A.2.i.
#include <algorithm>
#include <cstring>

#include "group_links.h"
#include "object_header.h"
#include "rows.h"

namespace hsgd::io {
namespace {

constexpr unsigned kMostAxes = 33;  // of a chunk, the bytes of an element among them

// Where an array lies: in one piece, in one chunk, or in one that a tree names.
struct Layout {
  uint64_t address;
  uint64_t size;
  uint32_t mask = 0;
  uint64_t rows = 1;
  bool in_tree = false;
  bool in_filters = false;  // one chunk, with its size and mask
  unsigned axes = 0;
  uint32_t chunk[kMostAxes];
};

// Reads one chunk of the newer form, of which class and version were read.
bool read_chunk(Cursor* at, Layout* layout) {
  const unsigned flags = at->byte();
  layout->axes = at->byte();
  const unsigned wide = at->byte();
  if ((flags & ~3U) != 0 || layout->axes > kMostAxes || wide == 0 || wide > 8) return false;
  layout->size = 1;
  for (unsigned axis = 0; axis < layout->axes; ++axis) {
    const uint64_t length = at->number(wide);
    if (length == 0 || length > UINT32_MAX / layout->size) return false;
    layout->size *= length;
  }
  layout->in_filters = (flags & 2) != 0;
  return at->byte() == 1;  // no index but that of a single chunk
}

// Reads where an array lies, and sets to zero what differs between arrays of one form.
bool take_place(uint8_t* bytes, size_t size, Layout* layout) {
  Cursor at(bytes, size);
  const unsigned version = at.byte();
  const unsigned kind = at.byte();
  if (version < 3 || version > 5) return false;
  size_t changing = 8;
  if (kind == 1) {
    layout->address = at.word();
    layout->size = at.word();
    if (at.ok()) std::memset(bytes + 2, 0, 16);
    return at.ok();
  }
  if (kind != 2) return false;
  if (version == 3) {
    layout->in_tree = true;
    layout->axes = at.byte();
    if (layout->axes < 2 || layout->axes > kMostAxes) return false;
    layout->address = at.word();
    for (unsigned axis = 0; axis < layout->axes; ++axis) {
      layout->chunk[axis] = at.next<uint32_t>();
      if (layout->chunk[axis] == 0) return false;
    }
    if (at.ok()) std::memset(bytes + 3, 0, changing);
    return at.ok();
  }
  if (!read_chunk(&at, layout)) return false;
  const size_t start = size - at.left();
  if (layout->in_filters) {
    layout->size = at.word();
    layout->mask = at.next<uint32_t>();
    changing += 12;
  }
  layout->address = at.word();
  if (at.ok()) std::memset(bytes + start, 0, changing);
  return at.ok();
}

// Reads the only entry of a tree of chunks.
bool find_chunk(File* file, Layout* layout) {
  uint8_t bytes[24 + 2 * (8 + 8 * kMostAxes) + 8];
  const size_t key_bytes = 8 + 8 * layout->axes;
  const uint64_t all = 24 + 8 * file->chunk_entries + key_bytes * (file->chunk_entries + 1);
  const uint64_t tree = layout->address;
  const size_t read = 24 + 2 * key_bytes + 8;
  if (!file->has(tree, all) || !file->read(tree, bytes, read)) return false;
  Cursor at(bytes, read);
  if (!at.is("TREE") || at.byte() != 1 || at.byte() != 0 || at.next<uint16_t>() != 1) return false;
  if (file->chunk_entries < 1 || at.word() != kUndefined || at.word() != kUndefined) return false;
  layout->size = at.next<uint32_t>();
  layout->mask = at.next<uint32_t>();
  for (unsigned axis = 0; axis < layout->axes; ++axis) {
    if (at.word() != 0) return false;
  }
  layout->address = at.word();
  at.take(8);
  for (unsigned axis = 0; axis < layout->axes; ++axis) {
    if (at.word() % layout->chunk[axis] != 0) return false;
  }
  return at.ok();
}

// Reads the length of the first axis, and sets it to zero.
bool take_rows(uint8_t* bytes, size_t size, Layout* layout) {
  Cursor at(bytes, size);
  const unsigned version = at.byte();
  const unsigned axes = at.byte();
  const unsigned flags = at.byte();
  at.take(version == 1 ? 5 : 1);
  if (version < 1 || version > 2 || (flags & ~1U) != 0) return false;
  if (axes == 0) return at.ok();
  const size_t start = size - at.left();
  layout->rows = at.word();
  at.take(8 * (axes - 1));
  const size_t limits = size - at.left();
  const uint64_t most = (flags & 1) != 0 ? at.word() : kUndefined;
  if (!at.ok() || layout->rows > most) return false;
  std::memset(bytes + start, 0, 8);
  if (layout->rows == most) std::memset(bytes + limits, 0, 8);
  return true;
}

// Returns whether `name`, of at most `size` bytes, is one of some names, the last of which is
// empty.
bool is_among(const char* names, const uint8_t* name, size_t size) {
  for (size_t length = std::strlen(names); length > 0; length = std::strlen(names)) {
    if (length < size && std::memcmp(name, names, length + 1) == 0) return true;
    names += length + 1;
  }
  return false;
}

// Sets the value of an attribute to zero, unless values of this name count. That of a text is a
// place in the file, different for each array.
bool clear_value(uint8_t* bytes, size_t size, const char* names) {
  Cursor at(bytes, size);
  const unsigned version = at.byte();
  at.take(1);
  const size_t name_bytes = at.next<uint16_t>();
  uint64_t before = 0;  // type and shape
  for (int part = 0; part < 2; ++part) {
    const uint64_t length = at.next<uint16_t>();
    before += version == 1 ? (length + 7) / 8 * 8 : length;
  }
  at.take(version == 3 ? 1 : 0);
  const uint8_t* name = at.take(version == 1 ? (name_bytes + 7) / 8 * 8 : name_bytes);
  at.take(before);
  if (version < 1 || version > 3 || !at.ok()) return false;
  if (!is_among(names, name, name_bytes)) std::memset(bytes + size - at.left(), 0, at.left());
  return true;
}

// What arrays of one form have in common: their messages, without what says where each lies.
struct Form {
  size_t size = 0;
  uint8_t bytes[kMostBytes];

  // Returns where the copied bytes are, or NULL if they do not fit.
  uint8_t* add(const void* from, size_t count) {
    if (count > kMostBytes - size) return nullptr;
    uint8_t* to = bytes + size;
    if (count > 0) std::memcpy(to, from, count);
    size += count;
    return to;
  }
};

// Memory for the objects that are read one after the other.
struct Objects {
  explicit Objects(int descriptor) : file(descriptor) {}

  File file;
  Header header;
  Form form;
  GroupParts parts;
};

// Reads the dataset at `address`: its form, with the values of some attributes, and its place.
bool read_array(Objects* objects, uint64_t address, const char* valued, Layout* layout) {
  Form* form = &objects->form;
  form->size = 0;
  if (!objects->header.open(&objects->file, address)) return false;
  const uint8_t kind = static_cast<uint8_t>(objects->header.kind());
  form->add(&kind, 1);
  bool has_shape = false;  // of two messages of one type HDF5 takes the first
  bool has_layout = false;
  bool has_filters = false;
  Message message;
  while (objects->header.next(&message)) {
    switch (message.type) {
      case kOldTime:
      case kTime:
        continue;
      case kLinkInfo:
      case kLink:
      case kSymbolTable:
      case kExternalFiles:
      case kReferences:
        return false;
      case kFilters:
        if (has_filters || message.size < 2 || message.bytes[1] == 0) return false;
        has_filters = true;
        break;
      case kAttributeInfo:
        if (!is_compact(message)) return false;
        break;
      default:
        break;
    }
    const uint16_t head[3] = {static_cast<uint16_t>(message.type),
                              static_cast<uint16_t>(message.size),
                              static_cast<uint16_t>(message.flags)};
    if (form->add(head, sizeof(head)) == nullptr) return false;
    uint8_t* copy = form->add(message.bytes, message.size);
    if (copy == nullptr) return false;
    if (message.type == kAttribute && !clear_value(copy, message.size, valued)) return false;
    if (message.type == kShape) {
      if (has_shape || !take_rows(copy, message.size, layout)) return false;
      has_shape = true;
    }
    if (message.type != kLayout) continue;
    if (has_layout || !take_place(copy, message.size, layout)) return false;
    has_layout = true;
  }
  if (!objects->header.ok() || !has_shape || !has_layout) return false;
  if (layout->axes > 0 && !layout->in_tree && layout->in_filters != has_filters) return false;
  if (layout->in_tree && !find_chunk(&objects->file, layout)) return false;
  if (layout->address == 0 || layout->size == 0) return false;
  return objects->file.has(layout->address, layout->size);
}

void write_place(const Layout& layout, int64_t at, const hsgd_io_places& places) {
  places.positions[at] = static_cast<int64_t>(layout.address);
  places.sizes[at] = static_cast<int64_t>(layout.size);
  places.masks[at] = layout.mask;
  places.rows[at] = static_cast<int64_t>(layout.rows);
}

// Takes the links of a group; see read_group().
bool take_links(Objects* objects, uint64_t address, int64_t parent, Steps* steps) {
  return read_group(&objects->file, &objects->header, &objects->parts, address, parent, steps);
}

// Finds all arrays of sample `number` of `count`.
bool find_sample(Objects* objects, const hsgd_io_forms& forms, Steps* steps, uint64_t group,
                 int64_t number, int64_t count, const hsgd_io_places& places) {
  steps->begin();
  if (!take_links(objects, group, -1, steps)) return false;
  for (int64_t step = 0; step < steps->count(); ++step) {
    const uint64_t address = steps->address(step);
    const int64_t field = steps->field(step);
    if (address == kUndefined) return false;
    if (field < 0) {
      if (!take_links(objects, address, step, steps)) return false;
      continue;
    }
    const auto* form = static_cast<const uint8_t*>(forms.forms[field]);
    const auto size = static_cast<size_t>(forms.form_bytes[field]);
    Layout layout;
    if (!read_array(objects, address, forms.valued, &layout)) return false;
    if (objects->form.size != size || std::memcmp(objects->form.bytes, form, size) != 0) {
      return false;
    }
    write_place(layout, field * count + number, places);
  }
  return true;
}

}  // namespace
}  // namespace hsgd::io

int64_t hsgd_io_array_form(int file, int64_t file_bytes, uint64_t address, const char* valued,
                           void* form, int64_t room, const hsgd_io_places* place) {
  hsgd::io::Objects objects(file);
  hsgd::io::Layout layout;
  if (!objects.file.open(static_cast<uint64_t>(file_bytes))) return 0;
  if (!hsgd::io::read_array(&objects, address, valued, &layout)) return 0;
  if (objects.form.size > static_cast<uint64_t>(room)) return 0;
  std::memcpy(form, objects.form.bytes, objects.form.size);
  hsgd::io::write_place(layout, 0, *place);
  return static_cast<int64_t>(objects.form.size);
}

void hsgd_io_find_arrays(const hsgd_io_forms* forms, const uint64_t* groups, int64_t count,
                         uint8_t* found, const hsgd_io_places* places) {
  std::memset(found, 0, static_cast<size_t>(count));
  hsgd::io::Objects objects(static_cast<int>(forms->file));
  hsgd::io::Steps steps(forms->steps, forms->step_count);
  if (forms->step_count > hsgd::io::kMostSteps) return;
  if (!objects.file.open(static_cast<uint64_t>(forms->file_bytes))) return;
  for (int64_t number = 0; number < count; ++number) {
    found[number] =
        hsgd::io::find_sample(&objects, *forms, &steps, groups[number], number, count, *places);
  }
}
