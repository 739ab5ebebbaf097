// Package slot computes how a watcher is split into slots (N28): which keys a slot has, the id of its watcher
// document, the filter for its envelopes, and which node runs which slot. It does no I/O.
//
// A hash of the key selects one of 1024 hash slots, which the envelope has in its field `slot`. A slot of the
// watcher is a range of hash slots, so each envelope belongs to exactly one slot. If the field is missing, not a
// number or out of range, the envelope belongs to slot 0.
package slot

import (
	"fmt"
	"strconv"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/keyhash"
)

// MaxSlots is the maximum number of slots of a watcher. Each slot costs a change stream and a value of a
// metric label.
const MaxSlots = 64

// Range is slot I of N. The zero value is the whole watcher, like 0 of 1.
type Range struct{ I, N int }

// Whole reports whether there is only one slot.
func (p Range) Whole() bool { return p.N <= 1 }

// String returns the slot as in documents and labels, such as "0of2". For the whole watcher it is "0of1".
func (p Range) String() string {
	return strconv.Itoa(p.I) + "of" + strconv.Itoa(max(p.N, 1))
}

// ID returns the id of the watcher document (N28).
func (p Range) ID(watcher string) string { return watcher + "/" + p.String() }

// Ranges returns all slots of a watcher with n slots.
func Ranges(n int) []Range {
	out := make([]Range, max(n, 1))
	for i := range out {
		out[i] = Range{i, max(n, 1)}
	}
	return out
}

// Parse parses a slot such as "0of2".
func Parse(text string) (Range, error) {
	i, n, found := strings.Cut(text, "of")
	slot := Range{-1, 0}
	if found {
		slot.I, _ = strconv.Atoi(i)
		slot.N, _ = strconv.Atoi(n)
	}

	if slot.I < 0 || slot.I >= slot.N || slot.String() != text {
		return Range{}, fmt.Errorf("invalid slot %q: use a form such as 0of2", text)
	}
	return slot, nil
}

// ParseID splits the id of a watcher document into the watcher and the slot.
func ParseID(id string) (watcher string, slot Range, ok bool) {
	slash := strings.LastIndexByte(id, '/')
	if slash < 0 {
		return "", Range{}, false
	}
	slot, err := Parse(id[slash+1:])
	return id[:slash], slot, err == nil
}

// hashSlots returns the range of hash slots: from low up to but excluding high.
func (p Range) hashSlots() (low, high int32) {
	n := max(p.N, 1)
	return int32(p.I * keyhash.Slots / n), int32((p.I + 1) * keyhash.Slots / n)
}

// Overlaps reports whether p and slot share hash slots. They may belong to different divisions.
func (p Range) Overlaps(slot Range) bool {
	low, high := p.hashSlots()
	qLow, qHigh := slot.hashSlots()
	return low < qHigh && qLow < high
}

// Filter returns the filter for documents of the slot by their field. For the whole watcher it is nil. Every
// document matches the filter of exactly one slot. The comparisons match only numbers. Two elements of an
// array could match the filters of two slots, so an array matches only slot 0.
func (p Range) Filter(field string) bson.D {
	if p.Whole() {
		return nil
	}

	low, high := p.hashSlots()
	if p.I > 0 {
		return bson.D{{Key: field, Value: numberInRange(low, high)}}
	}

	// Slot 0 also has all documents without a valid hash slot.
	others := bson.D{{Key: field, Value: numberInRange(high, keyhash.Slots)}}
	return bson.D{{Key: "$nor", Value: bson.A{others}}}
}

func numberInRange(low, high int32) bson.D {
	notArray := bson.D{{Key: "$type", Value: "array"}}
	return bson.D{{Key: "$gte", Value: low}, {Key: "$lt", Value: high}, {Key: "$not", Value: notArray}}
}

// AddFilter returns filter restricted to the slot by the field `slot`. For the whole watcher it returns filter unchanged.
func (p Range) AddFilter(filter bson.D) bson.D {
	if p.Whole() {
		return filter
	}
	return bson.D{{Key: "$and", Value: bson.A{filter, p.Filter("slot")}}}
}

// Contains reports whether doc belongs to the slot. It agrees with Filter.
func (p Range) Contains(doc bson.Raw) bool {
	if p.Whole() {
		return true
	}

	slot, ok := number(doc.Lookup("slot"))
	if !ok {
		return p.I == 0
	}

	low, high := p.hashSlots()
	if p.I > 0 {
		return slot >= float64(low) && slot < float64(high)
	}
	return !(slot >= float64(high) && slot < keyhash.Slots)
}

// HashSlot returns the hash slot of doc as an integer, which belongs to the same slots of a watcher as doc. It returns 0 if doc has no
// valid one.
func HashSlot(doc bson.Raw) int32 {
	slot, ok := number(doc.Lookup("slot"))
	// The comparison is false for NaN.
	if !ok || !(slot >= 0 && slot < keyhash.Slots) {
		return 0
	}
	return int32(slot)
}

// number returns the value of value. ok is false if value is not a number.
func number(value bson.RawValue) (number float64, ok bool) {
	switch value.Type {
	case bson.TypeInt32:
		return float64(value.Int32()), true
	case bson.TypeInt64:
		return float64(value.Int64()), true
	case bson.TypeDouble:
		return value.Double(), true
	case bson.TypeDecimal128:
		number, err := strconv.ParseFloat(value.Decimal128().String(), 64)
		return number, err == nil
	}
	return 0, false
}
