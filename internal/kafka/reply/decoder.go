package reply

import "encoding/binary"

// Decoder walks a buffer; reading past its end sets Bad and yields zeros.
type Decoder struct {
	B   []byte // what is left
	Bad bool
}

// Bytes are the next n; nil for none or a negative number, as null has.
func (d *Decoder) Bytes(n int) []byte {
	if n <= 0 {
		return nil
	}
	if n > len(d.B) {
		d.B, d.Bad = nil, true
		return nil
	}
	x := d.B[:n:n]
	d.B = d.B[n:]
	return x
}

// Skip passes n bytes.
func (d *Decoder) Skip(n int) { d.Bytes(n) }

// Int16 is a number of two bytes.
func (d *Decoder) Int16() int16 {
	if x := d.Bytes(2); x != nil {
		return int16(binary.BigEndian.Uint16(x))
	}
	return 0
}

// Int32 is a number of four bytes.
func (d *Decoder) Int32() int32 {
	if x := d.Bytes(4); x != nil {
		return int32(binary.BigEndian.Uint32(x))
	}
	return 0
}

// Int64 is a number of eight bytes.
func (d *Decoder) Int64() int64 {
	if x := d.Bytes(8); x != nil {
		return int64(binary.BigEndian.Uint64(x))
	}
	return 0
}

// Count is the length of an array whose elements take at least that many bytes each; a null array has none.
func (d *Decoder) Count(least int) int {
	n := int(d.Int32())
	if n > len(d.B)/least {
		d.B, d.Bad = nil, true
		return 0
	}
	return max(0, n)
}

// Varint is a zigzag varint.
func (d *Decoder) Varint() int64 {
	x, n := binary.Varint(d.B)
	if n <= 0 {
		d.B, d.Bad = nil, true
		return 0
	}
	d.B = d.B[n:]
	return x
}

// Field is bytes with their length before them; nil for null alone.
func (d *Decoder) Field() []byte {
	n := d.Varint()
	switch {
	case n < 0:
		return nil
	case n == 0:
		return []byte{}
	}
	return d.Bytes(int(min(n, int64(len(d.B))+1)))
}
