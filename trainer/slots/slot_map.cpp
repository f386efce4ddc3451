// From the rows of several tables to the slots that hold them, during one step of a plan.
#include <algorithm>

#include "../../schemas/kernels/common.h"

namespace {

constexpr i64 kNoRow = -1;

// An open-addressed hash table at most half full, whose entries are slots; `rows_` has the row of each. Slots of table t
// are `starts[t]` to `starts[t + 1]`.
class SlotMap {
 public:
  explicit SlotMap(Flat<const i64> starts) : starts_(starts.begin(), starts.end()) {
    require(starts.size > 0 && starts[0] == 0 && std::is_sorted(starts.begin(), starts.end()),
            "starts must ascend from 0");
    require(starts_.back() < std::numeric_limits<i32>::max(), "slots must be fewer than 2**31");
    rows_.assign(starts_.back(), kNoRow);
    tables_.resize(starts_.back());
    for (size_t t = 0; t + 1 < starts_.size(); t++)
      std::fill(tables_.begin() + starts_[t], tables_.begin() + starts_[t + 1], static_cast<i32>(t));
    size_t size = 1024;
    while (size < 2 * rows_.size()) size *= 2;
    buckets_.assign(size, 0);
  }

  // Frees slots.
  void remove(Flat<const i32> slots) {
    require_rows(slots, rows_.size());
    for (const i32 slot : slots) {
      require(rows_[slot] != kNoRow, "slots must hold a row");
      u64 at = place(tables_[slot], rows_[slot]);
      while (buckets_[at] != static_cast<u32>(slot) + 1) at = next(at);
      rows_[slot] = kNoRow;
      // moves each entry behind it that would no longer be found over the gap
      for (u64 gap = at;;) {
        buckets_[gap] = 0;
        do {
          at = next(at);
          if (!buckets_[at]) break;
        } while (((at - home(at)) & mask()) < ((at - gap) & mask()));
        if (!buckets_[at]) break;
        buckets_[gap] = buckets_[at];
        gap = at;
      }
    }
  }

  // Puts rows, which have no slot, into free slots.
  void add(Flat<const i32> slots, Flat<const i64> rows) {
    require(slots.size == rows.size, "slots must have a row each");
    require_rows(slots, rows_.size());
    for (i64 i = 0; i < slots.size; i++) {
      const i32 slot = slots[i];
      require(rows_[slot] == kNoRow && rows[i] >= 0, "slots must be free");
      rows_[slot] = rows[i];
      u64 at = place(tables_[slot], rows[i]);
      while (buckets_[at]) at = next(at);
      buckets_[at] = static_cast<u32>(slot) + 1;
    }
  }

  // Returns a copy of look-ups, with the number of its slot in its table instead of each row; and -1, or the first
  // look-up whose row has none. Feature f has the look-ups from `offsets[f]` to `offsets[f + 1]`, and a table or -1:
  // then they are copied.
  std::tuple<Array<i64>, i64> find(Flat<const i64> values, Flat<const i64> offsets, Flat<const i64> tables) const {
    require_offsets(offsets, values.size);
    require(tables.size == offsets.size - 1, "features must have a table each");
    Array<i64> found(values.size);
    std::copy(values.begin(), values.end(), found.data());
    for (i64 f = 0; f < tables.size; f++) {
      const i64 table = tables[f];
      require(table < static_cast<i64>(starts_.size()) - 1, "tables must be in range");
      if (table < 0) continue;
      for (i64 i = offsets[f]; i < offsets[f + 1]; i++) {
        u64 at = place(table, values[i]);
        while (buckets_[at] && !is(buckets_[at] - 1, table, values[i])) at = next(at);
        if (!buckets_[at]) return {std::move(found), i};
        found[i] = buckets_[at] - 1 - starts_[table];
      }
    }
    return {std::move(found), -1};
  }

 private:
  u64 mask() const { return buckets_.size() - 1; }
  u64 next(u64 at) const { return (at + 1) & mask(); }
  u64 place(i64 table, i64 row) const { return splitmix64(static_cast<u64>(row) + static_cast<u64>(table) * kMix) & mask(); }
  u64 home(u64 at) const { return place(tables_[buckets_[at] - 1], rows_[buckets_[at] - 1]); }
  bool is(u32 slot, i64 table, i64 row) const { return rows_[slot] == row && tables_[slot] == table; }

  std::vector<i64> starts_, rows_;
  std::vector<i32> tables_;
  std::vector<u32> buckets_;  // 1 + slot; 0: free
};

}  // namespace

NB_MODULE(slot_map, m) {
  nb::class_<SlotMap>(m, "SlotMap")
      .def(nb::init<Flat<const i64>>(), nb::arg("starts"))
      .def("remove", &SlotMap::remove, nb::arg("slots"), Unlocked())
      .def("add", &SlotMap::add, nb::arg("slots"), nb::arg("rows"), Unlocked())
      .def("find", &SlotMap::find, nb::arg("values"), nb::arg("offsets"), nb::arg("tables"), Unlocked());
}
