package fetched

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/klauspost/compress/snappy"
	"github.com/klauspost/compress/zstd"
	"github.com/segmentio/kafka-go/compress"

	"github.com/outrelay/outrelay/internal/kafka/reply"
	"github.com/outrelay/outrelay/internal/record"
)

// The bounds of one record that a Stream reads.
const (
	MaxRecord  = 64 << 20 // bytes
	MaxHeaders = 1 << 16
)

// TooLargeError says that a record is above MaxRecord or MaxHeaders. The records behind it can be read.
type TooLargeError struct{ What string }

func (e *TooLargeError) Error() string { return "the record has " + e.What }

// Stream reads the records of a batch one after another. It holds one of them at a time, whatever the batch expands to, and
// each record has memory of its own: a small one does not keep a large answer in memory.
type Stream struct {
	batch *Batch
	r     *bufio.Reader
	left  int
	close func()
}

var readers = sync.Pool{New: func() any { return bufio.NewReaderSize(nil, 64<<10) }}

// Stream begins to read the records. The caller closes it.
func (b *Batch) Stream() (*Stream, error) {
	plain, end, err := expand(compress.Compression(b.attributes&7), b.body)
	if err != nil {
		return nil, fmt.Errorf("decompressing a batch: %w", err)
	}
	r, ok := readers.Get().(*bufio.Reader)
	if !ok {
		return nil, errors.New("the pool of readers has something else")
	}
	r.Reset(plain)
	s := &Stream{batch: b, r: r, left: b.count}
	s.close = func() {
		r.Reset(nil)
		readers.Put(r)
		end()
	}
	return s, nil
}

// Close ends the reading.
func (s *Stream) Close() { s.close() }

// recordHead is more than the length of what stands before a record's key: attributes, time and offset.
const recordHead = 32

// Next reads the next record into x and returns false behind the last one. Of records before that offset it sets only Offset.
// After a *TooLargeError, x has the record's place and time, and the next call reads the record behind it. After any other
// error nothing more can be read.
func (s *Stream) Next(x *Record, from int64) (bool, error) {
	if s.left <= 0 {
		return false, nil
	}
	s.left--
	size, err := binary.ReadVarint(s.r)
	if err != nil {
		return false, early(err)
	}
	if size < 0 {
		return false, fmt.Errorf("a record of %d bytes", size)
	}

	head, err := s.r.Peek(int(min(size, recordHead)))
	if err != nil {
		return false, early(err)
	}
	d := reply.Decoder{B: head}
	s.place(x, &d)
	switch {
	case d.Bad:
		return false, early(io.ErrUnexpectedEOF)
	case x.Offset < from:
		return true, s.skip(size)
	case size > MaxRecord:
		if err := s.skip(size); err != nil {
			return false, err
		}
		return true, &TooLargeError{fmt.Sprintf("%d bytes; at most %d can be read", size, MaxRecord)}
	}

	body, err := s.read(int(size))
	if err != nil {
		return false, early(err)
	}
	d = reply.Decoder{B: body}
	s.place(x, &d)
	x.Key, x.Value = d.Field(), d.Field()
	n := d.Varint()
	if n > MaxHeaders {
		x.Key, x.Value = nil, nil
		return true, &TooLargeError{fmt.Sprintf("%d headers; at most %d can be read", n, MaxHeaders)}
	}
	for ; n > 0 && !d.Bad; n-- {
		x.Headers = append(x.Headers, record.Header{Key: d.Field(), Value: d.Field()})
	}
	if d.Bad {
		return false, early(io.ErrUnexpectedEOF)
	}
	return true, nil
}

// place reads what stands before the key, and clears the rest.
func (s *Stream) place(x *Record, d *reply.Decoder) {
	d.Skip(1) // attributes
	*x = Record{TimeMS: s.batch.firstMS + d.Varint(), Headers: x.Headers[:0]}
	if s.batch.attributes&0x08 != 0 {
		x.TimeMS = s.batch.maxMS // the broker's time of the append
	}
	x.Offset = s.batch.Base + d.Varint()
}

// read returns the next n bytes. The memory grows with what arrives, not with what a length claims.
func (s *Stream) read(n int) ([]byte, error) {
	if n <= 1<<20 {
		p := make([]byte, n)
		_, err := io.ReadFull(s.r, p)
		return p, err
	}
	var b bytes.Buffer
	_, err := io.CopyN(&b, s.r, int64(n))
	return b.Bytes(), err
}

func (s *Stream) skip(n int64) error {
	if _, err := io.CopyN(io.Discard, s.r, n); err != nil {
		return early(err)
	}
	return nil
}

func early(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errors.New("a record ends too early")
	}
	return fmt.Errorf("decompressing a batch: %w", err)
}

// Kafka's own client accepts zstd windows of that size, too. One that is larger than a usual one is read while no other is.
const (
	maxWindow   = 128 << 20
	usualWindow = 8 << 20
)

var (
	wide     sync.Mutex
	decoders = sync.Pool{New: func() any {
		d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(maxWindow))
		if err != nil {
			return err
		}
		return d
	}}
)

// expand returns a reader of what was compressed, and how it is given back.
func expand(kind compress.Compression, b []byte) (plain io.Reader, end func(), err error) {
	switch kind {
	case compress.None:
		return bytes.NewReader(b), func() {}, nil
	case compress.Snappy:
		return &snappyReader{b: b}, func() {}, nil
	case compress.Zstd:
		return expandZstd(b)
	default:
	}
	codec := kind.Codec()
	if codec == nil {
		return nil, nil, fmt.Errorf("compression %d is unknown", kind)
	}
	r := codec.NewReader(bytes.NewReader(b))
	return r, func() { _ = r.Close() }, nil
}

func expandZstd(b []byte) (io.Reader, func(), error) {
	var h zstd.Header
	if err := h.Decode(b); err != nil {
		return nil, nil, err
	}
	if h.WindowSize > maxWindow {
		return nil, nil, zstd.ErrWindowSizeExceeded
	}

	if h.WindowSize > usualWindow { // its buffer is not kept for the next batch
		wide.Lock()
		d, err := zstd.NewReader(bytes.NewReader(b), zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(maxWindow))
		if err != nil {
			wide.Unlock()
			return nil, nil, err
		}
		return d, func() { d.Close(); wide.Unlock() }, nil
	}

	d, ok := decoders.Get().(*zstd.Decoder)
	if !ok {
		return nil, nil, errors.New("no zstd decoder could be made")
	}
	if err := d.Reset(bytes.NewReader(b)); err != nil {
		return nil, nil, err
	}
	return d, func() { _ = d.Reset(nil); decoders.Put(d) }, nil
}

// snappyReader reads one block, or blocks with their lengths before them, as Java's client frames them.
type snappyReader struct {
	b      []byte
	framed bool
	begun  bool
	plain  []byte
}

// xerial begins what Java's client writes; two numbers of four bytes follow.
var xerial = []byte{0x82, 'S', 'N', 'A', 'P', 'P', 'Y', 0}

func (s *snappyReader) Read(p []byte) (int, error) {
	if !s.begun {
		s.begun = true
		if s.framed = bytes.HasPrefix(s.b, xerial); s.framed {
			s.b = s.b[min(len(xerial)+8, len(s.b)):]
		}
	}
	for len(s.plain) == 0 {
		block := s.b
		if len(s.b) == 0 {
			return 0, io.EOF
		}
		if s.framed {
			if len(s.b) < 4 || uint64(binary.BigEndian.Uint32(s.b)) > uint64(len(s.b)-4) {
				return 0, io.ErrUnexpectedEOF
			}
			end := 4 + int(binary.BigEndian.Uint32(s.b))
			block = s.b[4:end]
			s.b = s.b[end:]
		} else {
			s.b = nil
		}
		if err := s.decode(block); err != nil {
			return 0, err
		}
	}
	n := copy(p, s.plain)
	s.plain = s.plain[n:]
	return n, nil
}

// decode refuses a block that claims more than snappy can make of its bytes: three of them are 64 at most.
func (s *snappyReader) decode(block []byte) (err error) {
	n, err := snappy.DecodedLen(block)
	if err != nil {
		return err
	}
	if n > 32*len(block) {
		return snappy.ErrCorrupt
	}
	s.plain, err = snappy.Decode(nil, block)
	return err
}
