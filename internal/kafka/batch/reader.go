package batch

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/outrelay/outrelay/internal/record"
)

// ErrCorrupt says that bytes are no batch that this package has made.
var ErrCorrupt = errors.New("record batch is corrupt")

// Reader reads the records of a batch one after another.
type Reader struct {
	p       []byte
	left    int32
	firstMS int64
	scratch []record.Header
}

// Reader reads what was appended so far. The Builder must not change while it is used.
func (b *Builder) Reader() *Reader {
	return &Reader{p: b.buf[start:], left: b.n, firstMS: b.firstMS}
}

// Open reads a record set that Seal has returned. A compressed one is decompressed into memory of its own.
func Open(sealed []byte) (*Reader, error) {
	be := binary.BigEndian
	if len(sealed) < start || int(be.Uint32(sealed)) != len(sealed)-prefix {
		return nil, fmt.Errorf("%w: %d bytes", ErrCorrupt, len(sealed))
	}
	h := sealed[prefix:]
	c := codecByID(int8(h[22] & 7))
	if h[16] != 2 || c == nil {
		return nil, fmt.Errorf("%w: version %d, attributes %#x", ErrCorrupt, h[16], h[22])
	}
	body := sealed[start:]
	if c.id != none {
		var err error
		if body, err = c.decompress(body); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrCorrupt, err)
		}
	}
	return &Reader{p: body, left: int32(be.Uint32(h[57:])), firstMS: int64(be.Uint64(h[27:]))}, nil
}

// Left is the number of records not read yet.
func (r *Reader) Left() int { return int(r.left) }

// Next reads the next record into rec: key, value, headers and time; topic and partition stay as they are. It returns
// false behind the last one. The slices alias the batch, and Headers is overwritten by the following call.
func (r *Reader) Next(rec *record.Record) (bool, error) {
	if r.left == 0 {
		return false, nil
	}
	d := decoder{p: r.p}
	size := d.varint()
	if d.bad || size < 1 || size > int64(len(d.p)) {
		return false, fmt.Errorf("%w: length of a record", ErrCorrupt)
	}
	r.p = d.p[size:]
	d.p = d.p[1:size]
	rec.TimeMS = r.firstMS + d.varint()
	d.varint() // offset
	rec.Key = d.bytes()
	rec.Value = d.bytes()
	n := d.varint()
	if d.bad || n < 0 || n > int64(len(d.p)) {
		return false, fmt.Errorf("%w: fields of a record", ErrCorrupt)
	}
	r.scratch = slices.Grow(r.scratch[:0], int(n))
	for range n {
		r.scratch = append(r.scratch, record.Header{Key: d.bytes(), Value: d.bytes()})
	}
	if d.bad || len(d.p) != 0 {
		return false, fmt.Errorf("%w: headers of a record", ErrCorrupt)
	}
	rec.Headers = r.scratch
	r.left--
	return true, nil
}

type decoder struct {
	p   []byte
	bad bool
}

func (d *decoder) varint() int64 {
	v, n := binary.Varint(d.p)
	if n <= 0 {
		d.bad = true
		return 0
	}
	d.p = d.p[n:]
	return v
}

func (d *decoder) bytes() []byte {
	n := d.varint()
	if d.bad || n > int64(len(d.p)) || n < -1 {
		d.bad = true
		return nil
	}
	if n == -1 {
		return nil
	}
	b := d.p[:n:n]
	d.p = d.p[n:]
	return b
}
