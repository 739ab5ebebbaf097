package response

import (
	"encoding/binary"

	"github.com/outrelay/outrelay/internal/contract/record"
)

// Decoder reads fields from a buffer, one after another. A read past the end sets Bad and returns zero.
type Decoder struct {
	B   []byte // the rest of the buffer
	Bad bool
}

// Bytes returns the next n bytes. It returns nil if n is zero or negative. Null has a negative length.
func (d *Decoder) Bytes(n int) []byte {
	if n <= 0 {
		return nil
	}
	if n > len(d.B) {
		d.B, d.Bad = nil, true
		return nil
	}
	taken := d.B[:n:n]
	d.B = d.B[n:]
	return taken
}

// Skip discards n bytes.
func (d *Decoder) Skip(n int) { d.Bytes(n) }

// Int16 returns the next two bytes as a number.
func (d *Decoder) Int16() int16 {
	if data := d.Bytes(2); data != nil {
		return int16(binary.BigEndian.Uint16(data))
	}
	return 0
}

// Int32 returns the next four bytes as a number.
func (d *Decoder) Int32() int32 {
	if data := d.Bytes(4); data != nil {
		return int32(binary.BigEndian.Uint32(data))
	}
	return 0
}

// Int64 returns the next eight bytes as a number.
func (d *Decoder) Int64() int64 {
	if data := d.Bytes(8); data != nil {
		return int64(binary.BigEndian.Uint64(data))
	}
	return 0
}

// Count returns the length of an array whose elements take at least that many bytes each. The length of
// a null array is 0.
func (d *Decoder) Count(least int) int {
	n := int(d.Int32())
	if n > len(d.B)/least {
		d.B, d.Bad = nil, true
		return 0
	}
	return max(0, n)
}

// Varint returns the next zigzag varint.
func (d *Decoder) Varint() int64 {
	value, n := binary.Varint(d.B)
	if n <= 0 {
		d.B, d.Bad = nil, true
		return 0
	}
	d.B = d.B[n:]
	return value
}

// Field returns bytes that are preceded by their length. It returns nil only for null.
func (d *Decoder) Field() []byte {
	n := d.Varint()
	switch {
	case n < 0:
		return nil
	case n == 0:
		return []byte{}
	}
	// Any length beyond the end fails. The smallest such length also fits an int of 32 bits.
	return d.Bytes(int(min(n, int64(len(d.B))+1)))
}

// CompactLength returns the length of a compact array or string, which is encoded as the length plus one.
// The length of null is 0.
func (d *Decoder) CompactLength() int { return max(d.uvarint()-1, 0) }

// CompactBytes returns a compact string, or compact bytes of any length.
func (d *Decoder) CompactBytes() []byte { return d.Bytes(max(d.uvarintUpTo(len(d.B))-1, 0)) }

// SkipTags discards the tagged fields at the end of a structure.
func (d *Decoder) SkipTags() { d.walkTags(nil) }

// walkTags reads the tagged fields at the end of a structure, the known ones with their plan.
func (d *Decoder) walkTags(known map[int]plan) {
	for n := d.uvarint(); n > 0 && !d.Bad; n-- {
		number, size := d.uvarint(), d.uvarint()
		if plan := known[number]; plan != nil {
			plan(d)
		} else {
			d.Skip(size)
		}
	}
}

// uvarint returns the next length or count of a flexible version.
func (d *Decoder) uvarint() int { return d.uvarintUpTo(record.MaxResponse) }

// uvarintUpTo returns the next length or count, which must not be above most.
func (d *Decoder) uvarintUpTo(most int) int {
	value, n := binary.Uvarint(d.B)
	if n <= 0 || value > uint64(most) {
		d.B, d.Bad = nil, true
		return 0
	}
	d.B = d.B[n:]
	return int(value)
}
