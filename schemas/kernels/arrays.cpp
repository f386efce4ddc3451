// Kernels over flat arrays: distinct tuples, gathers of lists, distinct values of lists.
// `arrays.pyi` says what each function returns.
#include <algorithm>

#include "common.h"

namespace {

inline u64 load(const uint8_t* p, size_t bytes) {
  u64 word = 0;
  std::memcpy(&word, p, bytes);
  return word;
}

// Two lanes, so that their multiplications overlap.
inline u64 hash_bytes(const uint8_t* p, size_t size, u64 seed) {
  u64 a = multiply(seed ^ kMix, size * kMix + 1), b = multiply(seed, kMix);
  const uint8_t* end = p + size;
  for (; p + 32 <= end; p += 32) {
    a = multiply(load(p, 8) ^ a, load(p + 8, 8) ^ seed);
    b = multiply(load(p + 16, 8) ^ b, load(p + 24, 8) ^ seed);
  }
  for (; p + 8 <= end; p += 8) a = multiply(load(p, 8) ^ a, seed);
  if (p < end) a = multiply(load(p, end - p) ^ a, ~seed);
  return multiply(a ^ kOdd, b ^ kMix);
}

// One column: fixed-width values, or lists of them with `num_rows + 1` offsets.
struct Column {
  const uint8_t* values;
  const i64* offsets;
  i64 width, num_rows;
};

template <class T>
void hash_fixed(const uint8_t* values, i64 rows, u64 seed, u64* hashes) {
  for (i64 i = 0; i < rows; i++) {
    T value;
    std::memcpy(&value, values + i * sizeof(T), sizeof(T));
    hashes[i] = multiply(hashes[i] ^ static_cast<u64>(value) ^ seed, kOdd);
  }
}

void hash_column(const Column& c, u64 seed, u64* hashes) {
  const i64 rows = c.num_rows;
  if (c.offsets) {
    for (i64 i = 0; i < rows; i++) {
      const size_t size = (c.offsets[i + 1] - c.offsets[i]) * c.width;
      hashes[i] = multiply(hashes[i] ^ hash_bytes(c.values + c.offsets[i] * c.width, size, seed), kOdd);
    }
    return;
  }
  switch (c.width) {
    case 1: return hash_fixed<uint8_t>(c.values, rows, seed, hashes);
    case 2: return hash_fixed<uint16_t>(c.values, rows, seed, hashes);
    case 4: return hash_fixed<uint32_t>(c.values, rows, seed, hashes);
    default: return hash_fixed<u64>(c.values, rows, seed, hashes);
  }
}

bool equal_rows(const Column& c, i64 a, i64 b) {
  if (!c.offsets) return std::memcmp(c.values + a * c.width, c.values + b * c.width, c.width) == 0;
  const i64 length = c.offsets[a + 1] - c.offsets[a];
  return length == c.offsets[b + 1] - c.offsets[b] &&
         std::memcmp(c.values + c.offsets[a] * c.width, c.values + c.offsets[b] * c.width, length * c.width) == 0;
}

template <class T>
bool fixed_equal(const Column& c, const i32* number, const i64* first) {
  const T* values = reinterpret_cast<const T*>(c.values);
  T different = 0;
  for (i64 i = 0; i < c.num_rows; i++) different |= values[i] ^ values[first[number[i]]];
  return different == 0;
}

bool column_equal(const Column& c, const i32* number, const i64* first) {
  if (!c.offsets) {
    switch (c.width) {
      case 1: return fixed_equal<uint8_t>(c, number, first);
      case 2: return fixed_equal<uint16_t>(c, number, first);
      case 4: return fixed_equal<uint32_t>(c, number, first);
      default: return fixed_equal<u64>(c, number, first);
    }
  }
  for (i64 i = 0; i < c.num_rows; i++) {
    const i64 representative = first[number[i]];
    if (representative != i && !equal_rows(c, i, representative)) return false;
  }
  return true;
}

template <class T>
void take_values(const T* values, Flat<const i64> rows, T* out) {
  for (i64 i = 0; i < rows.size; i++) out[i] = values[rows[i]];
}

// Returns the end of the copy.
uint8_t* copy_range(Numbers values, i64 start, i64 length, uint8_t* to) {
  const i64 width = values.width();
  if (length) std::memcpy(to, values.bytes() + start * width, length * width);
  return to + length * width;
}

inline u64 hash_row(u64 id, u64 salt, u64 num_rows) {
  const u64 hash = splitmix64(id ^ salt) & (~0ull >> 1);
  return num_rows & (num_rows - 1) ? hash % num_rows : hash & (num_rows - 1);
}

// A set of rows of a table that is written in ascending order and emptied. Small tables have a bit for each row; rows of larger
// ones are sorted.
class RowSet {
 public:
  explicit RowSet(u64 num_rows) : is_small_(num_rows <= kMaxBits), bits_(is_small_ ? num_rows : 0) {}

  void add(u64 row) {
    if (is_small_)
      bits_.add(row);
    else if (static_cast<size_t>(numbering_.number(row)) == rows_.size())
      rows_.push_back(static_cast<i64>(row));
  }

  // Writes the rows and empties the set; returns the end of what is written.
  i64* write(i64* out) {
    if (is_small_) return bits_.write(out);
    std::sort(rows_.begin(), rows_.end());
    out = std::copy(rows_.begin(), rows_.end(), out);
    rows_.clear();
    numbering_ = Numbering();
    return out;
  }

 private:
  static constexpr u64 kMaxBits = 1 << 24;
  const bool is_small_;
  BitSet bits_;
  Numbering numbering_;
  std::vector<i64> rows_;
};

using Columns = std::vector<std::tuple<Numbers, std::optional<Flat<const i64>>>>;

std::vector<Column> checked(const Columns& arguments) {
  require(!arguments.empty(), "columns must be at least one");
  std::vector<Column> columns;
  for (const auto& [values, offsets] : arguments) {
    if (offsets) require_offsets(*offsets, values.size);
    const i64 num_rows = offsets ? offsets->size - 1 : values.size;
    columns.push_back({values.bytes(), offsets ? offsets->data : nullptr, values.width(), num_rows});
    require(num_rows == columns[0].num_rows, "columns must have equally many rows");
  }
  return columns;
}

// The hash of a row of a column, as the format has it.
template <class T>
u64 stable_hash(const Column& c, i64 row, u64 salt) {
  const T* values = reinterpret_cast<const T*>(c.values);
  if (!c.offsets) return splitmix64(values[row] ^ salt);
  u64 sum = 0;
  const i64 start = c.offsets[row], length = c.offsets[row + 1] - start;
  for (i64 i = 0; i < length; i++) sum += splitmix64(values[start + i] + splitmix64(i) + salt);
  return splitmix64(sum + length);
}

Array<u64> hash_keys(const Columns& arguments) {
  const std::vector<Column> columns = checked(arguments);
  Array<u64> out(columns[0].num_rows);
  for (size_t c = 0; c < columns.size(); c++) {
    const u64 salt = splitmix64(c);
    const auto hash = [&](auto like) {
      for (i64 i = 0; i < out.size(); i++) {
        const u64 part = splitmix64(stable_hash<decltype(like)>(columns[c], i, salt) ^ salt);
        out[i] = c ? splitmix64(out[i] * 31 + part) : part;
      }
    };
    switch (columns[c].width) {
      case 1: hash(uint8_t()); break;
      case 2: hash(uint16_t()); break;
      case 4: hash(u32()); break;
      default: hash(u64());
    }
  }
  return out;
}

// Numbers the distinct rows of all columns taken together, in order of first appearance; none if different rows have
// equal hashes under this seed.
std::optional<std::tuple<Array<i64>, Array<i32>>> unique_tuples(const Columns& arguments, u64 seed) {
  const std::vector<Column> columns = checked(arguments);
  const i64 num_rows = columns[0].num_rows;
  Array<i64> first(num_rows);
  Array<i32> inverse(num_rows);
  std::vector<u64> hashes(num_rows, seed);
  for (size_t c = 0; c < columns.size(); c++) hash_column(columns[c], (seed + c + 1) * kOdd, hashes.data());
  Numbering numbering;
  for (i64 i = 0; i < num_rows; i++) {
    if (i && hashes[i] == hashes[i - 1]) {  // consecutive rows often repeat
      inverse[i] = inverse[i - 1];
      continue;
    }
    const i32 before = numbering.count();
    inverse[i] = numbering.number(hashes[i]);
    if (numbering.count() > before) first[before] = i;
  }
  for (const Column& column : columns)
    if (!column_equal(column, inverse.data(), first.data())) return std::nullopt;
  first.shrink(numbering.count());
  return std::tuple(std::move(first), std::move(inverse));
}

// Finds the first of equal references within each range, of which there are ascending ones; numbers them in order.
std::tuple<Array<i64>, Array<i64>> unique_in_ranges(Flat<const i64> ranges, Flat<const i64> references, i64 num_references) {
  require(ranges.size == references.size, "ranges and references must be equally many");
  require_rows(references, num_references);
  Array<i64> first(references.size), inverse(references.size);
  std::vector<i64> numbers(num_references, -1);
  i64 found = 0, range_start = 0;
  for (i64 i = 0; i < references.size; i++) {
    if (i && ranges[i] != ranges[i - 1]) range_start = found;
    i64& number = numbers[references[i]];
    if (number < range_start) {
      first[found] = i;
      number = found++;
    }
    inverse[i] = number;
  }
  first.shrink(found);
  return {std::move(first), std::move(inverse)};
}

NumberArray take(Numbers values, Flat<const i64> rows) {
  require_rows(rows, values.size);
  NumberArray out(rows.size, values.dtype);
  const auto copy = [&](auto like) {
    using T = decltype(like);
    take_values(static_cast<const T*>(values.data), rows, reinterpret_cast<T*>(out.bytes()));
  };
  switch (values.width()) {
    case 1: copy(uint8_t()); break;
    case 2: copy(uint16_t()); break;
    case 4: copy(u32()); break;
    default: copy(u64());
  }
  return out;
}

// Returns the values and offsets of the lists of `rows`.
std::tuple<NumberArray, Array<i64>> take_lists(Numbers values, Flat<const i64> offsets, Flat<const i64> rows) {
  require_offsets(offsets, values.size);
  require_rows(rows, offsets.size - 1);
  Array<i64> ends(rows.size + 1);
  ends[0] = 0;
  for (i64 i = 0; i < rows.size; i++) ends[i + 1] = ends[i] + offsets[rows[i] + 1] - offsets[rows[i]];
  NumberArray out(ends[rows.size], values.dtype);
  const i64 width = values.width();
  for (i64 i = 0; i < rows.size; i++)
    copy_range(values, offsets[rows[i]], ends[i + 1] - ends[i], out.bytes() + ends[i] * width);
  return {std::move(out), std::move(ends)};
}

// Returns the values of some ranges, one after the other.
NumberArray take_ranges(Numbers values, Flat<const i64> starts, Flat<const i64> lengths) {
  require(starts.size == lengths.size, "starts and lengths must be equally many");
  i64 total = 0;
  for (i64 i = 0; i < starts.size; i++) {
    require(starts[i] >= 0 && lengths[i] >= 0 && starts[i] <= values.size - lengths[i], "ranges must be within the values");
    total += lengths[i];
  }
  NumberArray out(total, values.dtype);
  uint8_t* to = out.bytes();
  for (i64 i = 0; i < starts.size; i++) to = copy_range(values, starts[i], lengths[i], to);
  return out;
}

// Returns the ascending distinct rows of a table that the ids of all columns stand for, block after block, and their
// offsets; none if an id is not a row. Ids are hashed with a salt, or are the rows themselves.
std::optional<std::tuple<Array<i64>, Array<i64>>> distinct_rows(const std::vector<std::tuple<Numbers, Flat<const i64>>>& columns,
                                                              std::optional<u64> salt, u64 num_rows) {
  require(!columns.empty(), "columns must be at least one");
  require(num_rows > 0, "the table must have rows");
  const i64 num_blocks = std::get<1>(columns[0]).size - 1;
  for (const auto& [ids, offsets] : columns) {
    require_offsets(offsets, ids.size);
    require(offsets.size == num_blocks + 1, "columns must have equally many blocks");
  }
  u64 capacity = 0;
  for (i64 b = 0; b < num_blocks; b++) {
    u64 count = 0;
    for (const auto& [ids, offsets] : columns) count += offsets[b + 1] - offsets[b];
    capacity += std::min(count, num_rows);
  }
  Array<i64> out(capacity), out_offsets(num_blocks + 1);
  RowSet set(num_rows);
  i64* end = out.data();
  out_offsets[0] = 0;
  for (i64 b = 0; b < num_blocks; b++) {
    for (const auto& [ids, offsets] : columns) {
      const i64 first = offsets[b], last = offsets[b + 1];
      const bool is_valid = typed(ids, [&](auto* values) {
        u64 largest = 0;
        for (i64 i = first; i < last; i++) {
          const u64 id = static_cast<u64>(static_cast<i64>(values[i]));
          largest = std::max(largest, id);
          if (salt)
            set.add(hash_row(id, *salt, num_rows));
          else if (id < num_rows)
            set.add(id);
        }
        return salt || largest < num_rows || first == last;
      });
      if (!is_valid) return std::nullopt;
    }
    end = set.write(end);
    out_offsets[b + 1] = end - out.data();
  }
  out.shrink(end - out.data());
  return std::tuple(std::move(out), std::move(out_offsets));
}

// For each list of `rows` but the first: the length of its start that is the end of the list before it, if that is at least
// half of the shorter one. The longest `max_candidates` possible overlaps are compared.
Array<i64> overlaps(Flat<const u64> values, Flat<const i64> offsets, Flat<const i64> rows, i64 max_candidates) {
  require_offsets(offsets, values.size);
  require_rows(rows, offsets.size - 1);
  Array<i64> out(rows.size);
  std::fill_n(out.data(), rows.size, 0);
  for (i64 i = 1; i < rows.size; i++) {
    const u64* before = values.data + offsets[rows[i - 1]];
    const u64* after = values.data + offsets[rows[i]];
    const i64 length = offsets[rows[i - 1] + 1] - offsets[rows[i - 1]];
    const i64 shorter = std::min(length, offsets[rows[i] + 1] - offsets[rows[i]]);
    require(shorter > 0, "lists must not be empty");
    i64 candidates = 0;
    for (i64 overlap = shorter; 2 * overlap >= shorter && candidates < max_candidates; overlap--) {
      if (before[length - overlap] != after[0]) continue;
      candidates++;
      if (std::memcmp(before + length - overlap, after, overlap * sizeof(u64))) continue;
      out[i] = overlap;
      break;
    }
  }
  return out;
}

Array<u64> splitmix64_all(Flat<const u64> values) {
  Array<u64> out(values.size);
  for (i64 i = 0; i < values.size; i++) out[i] = splitmix64(values[i]);
  return out;
}

// Maps ids to rows of a hashed table.
Array<i64> hash_rows(Flat<const u64> ids, u64 salt, u64 num_rows) {
  require(num_rows > 0, "the table must have rows");
  Array<i64> out(ids.size);
  for (i64 i = 0; i < ids.size; i++) out[i] = static_cast<i64>(hash_row(ids[i], salt, num_rows));
  return out;
}

// Inserts the rows at some positions into a hash map, each into the first free bucket from its hash on. A bucket has
// 1 + position, 0 if it is free; at least one is.
void insert_rows(Flat<u32> buckets, Flat<const i64> rows, i64 start, i64 end) {
  require(0 <= start && end <= rows.size, "positions must be of rows");
  require(buckets.size > end && !(buckets.size & (buckets.size - 1)), "buckets must be a power of two and more than rows");
  const u64 mask = buckets.size - 1;
  constexpr i64 kAhead = 16;  // buckets that are being loaded from memory
  for (i64 i = start; i < end; i++) {
    if (i + kAhead < end) __builtin_prefetch(&buckets[splitmix64(rows[i + kAhead]) & mask], 1);
    u64 at = splitmix64(rows[i]) & mask;
    while (buckets[at]) at = (at + 1) & mask;
    buckets[at] = static_cast<u32>(i + 1);
  }
}

}  // namespace

NB_MODULE(arrays, m) {
  m.def("unique_tuples", unique_tuples, nb::arg("columns"), nb::arg("seed"), Unlocked());
  m.def("hash_keys", hash_keys, nb::arg("columns"), Unlocked());
  m.def("unique_in_ranges", unique_in_ranges, nb::arg("ranges"), nb::arg("references"), nb::arg("num_references"), Unlocked());
  m.def("take", take, nb::arg("values"), nb::arg("rows"), Unlocked());
  m.def("take_lists", take_lists, nb::arg("values"), nb::arg("offsets"), nb::arg("rows"), Unlocked());
  m.def("take_ranges", take_ranges, nb::arg("values"), nb::arg("starts"), nb::arg("lengths"), Unlocked());
  m.def("distinct_rows", distinct_rows, nb::arg("columns"), nb::arg("salt").none(), nb::arg("num_rows"), Unlocked());
  m.def("overlaps", overlaps, nb::arg("values"), nb::arg("offsets"), nb::arg("rows"), nb::arg("max_candidates"), Unlocked());
  m.def("splitmix64", splitmix64_all, nb::arg("values"), Unlocked());
  m.def("hash_rows", hash_rows, nb::arg("ids"), nb::arg("salt"), nb::arg("num_rows"), Unlocked());
  m.def("insert_rows", insert_rows, nb::arg("buckets"), nb::arg("rows"), nb::arg("start"), nb::arg("end"), Unlocked());
}
