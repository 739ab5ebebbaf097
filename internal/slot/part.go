// Package slot is the arithmetic of a watcher that is split into slots (N28): which part of the ordering keys a slot has, how its
// document is named, how a server is asked for its envelopes, and which node runs which slot. It does no I/O.
//
// Each envelope belongs to exactly one part, whatever stands in its field `slot`: what is missing, no number or out of range
// belongs to part 0.
package slot

import (
	"fmt"
	"strconv"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/event"
)

// Most is the greatest number of slots of a watcher. Each costs a change stream, and each is a value of a metric's label.
const Most = 64

// Part is slot I of N. The zero value is the whole, as is 0 of 1.
type Part struct{ I, N int }

// Whole reports whether there is one part only.
func (p Part) Whole() bool { return p.N <= 1 }

// String is the part as documents and labels have it, "0of1" for the whole.
func (p Part) String() string {
	return strconv.Itoa(p.I) + "of" + strconv.Itoa(max(p.N, 1))
}

// ID is that of the watcher document (N28).
func (p Part) ID(watcher string) string { return watcher + "/" + p.String() }

// Parts are all of n.
func Parts(n int) []Part {
	out := make([]Part, max(n, 1))
	for i := range out {
		out[i] = Part{i, max(n, 1)}
	}
	return out
}

// Parse reads a part such as "0of2".
func Parse(text string) (Part, error) {
	i, n, found := strings.Cut(text, "of")
	p := Part{-1, 0}
	if found {
		p.I, _ = strconv.Atoi(i)
		p.N, _ = strconv.Atoi(n)
	}
	if p.I < 0 || p.I >= p.N || p.String() != text {
		return Part{}, fmt.Errorf("%q is no slot; write one as in 0of2", text)
	}
	return p, nil
}

// ParseID takes the id of a watcher document apart.
func ParseID(id string) (watcher string, p Part, ok bool) {
	at := strings.LastIndexByte(id, '/')
	if at < 0 {
		return "", Part{}, false
	}
	p, err := Parse(id[at+1:])
	return id[:at], p, err == nil
}

// hashSlots are the hash slots of the part: low is in it, high is not.
func (p Part) hashSlots() (low, high int32) {
	n := max(p.N, 1)
	return int32(p.I * event.Slots / n), int32((p.I + 1) * event.Slots / n)
}

// Overlaps reports whether some hash slots are in both parts, which may be of different divisions.
func (p Part) Overlaps(q Part) bool {
	low, high := p.hashSlots()
	from, to := q.hashSlots()
	return low < to && from < high
}

// Where is the condition that the server finds the part's documents by; field is where their slot stands. It is nil for the whole.
// The conditions of all parts together hold for every document exactly once: comparisons are with numbers alone, and an array,
// of which two elements could meet two conditions, meets none but that of part 0.
func (p Part) Where(field string) bson.D {
	if p.Whole() {
		return nil
	}
	low, high := p.hashSlots()
	if p.I > 0 {
		return bson.D{{Key: field, Value: numberInRange(low, high)}}
	}
	return bson.D{{Key: "$nor", Value: bson.A{bson.D{{Key: field, Value: numberInRange(high, event.Slots)}}}}}
}

func numberInRange(low, high int32) bson.D {
	return bson.D{{Key: "$gte", Value: low}, {Key: "$lt", Value: high}, {Key: "$not", Value: bson.D{{Key: "$type", Value: "array"}}}}
}

// And adds the condition on the field `slot` to a filter. The filter of the whole stays as it is.
func (p Part) And(filter bson.D) bson.D {
	if p.Whole() {
		return filter
	}
	return bson.D{{Key: "$and", Value: bson.A{filter, p.Where("slot")}}}
}

// Has reports whether a document is the part's, as Where does.
func (p Part) Has(doc bson.Raw) bool {
	if p.Whole() {
		return true
	}
	low, high := p.hashSlots()
	v := doc.Lookup("slot")
	var f float64
	switch v.Type {
	case bson.TypeInt32:
		f = float64(v.Int32())
	case bson.TypeInt64:
		f = float64(v.Int64())
	case bson.TypeDouble:
		f = v.Double()
	case bson.TypeDecimal128:
		d, err := strconv.ParseFloat(v.Decimal128().String(), 64)
		if err != nil {
			return p.I == 0
		}
		f = d
	default:
		return p.I == 0
	}
	if p.I > 0 {
		return f >= float64(low) && f < float64(high)
	}
	return !(f >= float64(high) && f < event.Slots)
}
