package fetched

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"

	"github.com/klauspost/compress/snappy"
	"github.com/klauspost/compress/zstd"
	"github.com/segmentio/kafka-go/compress"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire/response"
)

// The bounds of one record that a Stream reads, unless the batch is the process's own.
const (
	maxRecord  = 64 << 20 // bytes
	maxHeaders = 1 << 16
)

// TooLargeError means that a record exceeds maxRecord or maxHeaders. The records after it can be read.
type TooLargeError struct{ What string }

func (e *TooLargeError) Error() string { return "the record has " + e.What }

// Stream reads the records of a batch one after another. It holds only one record at a time, for any decompressed
// size of the batch. Each record has its own memory, so that a small record does not keep a large response in
// memory.
type Stream struct {
	batch   *Batch
	reader  *bufio.Reader
	left    int
	release func()
}

var readerPool = sync.Pool{New: func() any { return bufio.NewReaderSize(nil, 64<<10) }}

// Stream returns a reader of the records. The caller must close it.
func (b *Batch) Stream() (*Stream, error) {
	plain, releasePlain, err := b.openRecords()
	if err != nil {
		return nil, fmt.Errorf("decompressing a batch: %w", err)
	}
	reader, ok := readerPool.Get().(*bufio.Reader)
	if !ok {
		return nil, errors.New("the pool of readers has a value of another type")
	}
	reader.Reset(plain)

	stream := &Stream{batch: b, reader: reader, left: b.count}
	stream.release = func() {
		reader.Reset(nil)
		readerPool.Put(reader)
		releasePlain()
	}
	return stream, nil
}

// openRecords returns a reader of the decompressed records. The caller must call release when it has finished reading.
func (b *Batch) openRecords() (plain io.Reader, release func(), err error) {
	if b.pieces == nil {
		return openDecompressor(compress.Compression(b.attributes&compressionMask), b.body)
	}
	// Reading consumes the list.
	pieces := net.Buffers(slices.Clone(b.pieces))
	return &pieces, func() {}, nil
}

// Close releases the memory of the Stream. After the last record, that has happened already.
func (s *Stream) Close() {
	if s.release != nil {
		s.release()
		s.release, s.reader = nil, nil
	}
}

// maxRecordPrefix is more than the length of the fields before a record's key: attributes, time and
// offset.
const maxRecordPrefix = 32

// Next reads the next record into record. It returns false after the last record. For a record before the
// offset from it sets only record.Offset.
//
// After a *TooLargeError, record has the record's offset and time, and the next call reads the record after
// it. After any other error nothing more can be read.
func (s *Stream) Next(record *Record, from int64) (bool, error) {
	if s.left <= 0 || s.reader == nil {
		return false, nil
	}
	more, err := s.readRecord(record, from)
	if _, tooLarge := errors.AsType[*TooLargeError](err); s.left == 0 || err != nil && !tooLarge {
		// A decoder with a large window keeps others waiting.
		s.Close()
	}
	return more, err
}

// readRecord is Next while records are left.
func (s *Stream) readRecord(rec *Record, from int64) (bool, error) {
	s.left--

	size, err := binary.ReadVarint(s.reader)
	if err != nil {
		return false, recordError(err)
	}
	if size < 0 {
		return false, fmt.Errorf("a record of %d bytes", size)
	}

	// The fields before the key decide whether the record is read at all.
	head, err := s.reader.Peek(int(min(size, maxRecordPrefix)))
	if err != nil {
		return false, recordError(err)
	}
	decoder := response.Decoder{B: head}
	s.readPrefix(rec, &decoder)
	switch {
	case decoder.Bad:
		return false, recordError(io.ErrUnexpectedEOF)
	case rec.Offset < from:
		return true, s.discardBytes(size)
	case size > maxRecord && !s.batch.Own:
		if err := s.discardBytes(size); err != nil {
			return false, err
		}
		return true, &TooLargeError{fmt.Sprintf("%d bytes; at most %d can be read", size, maxRecord)}
	}

	body, err := s.readBytes(int(size))
	if err != nil {
		return false, recordError(err)
	}
	// Peek has left the prefix in the reader, so the body begins with it.
	decoder = response.Decoder{B: body}
	s.readPrefix(rec, &decoder)
	rec.Key, rec.Value = decoder.Field(), decoder.Field()

	// The number of headers is only a claim, so it is checked before memory is allocated for them.
	n := decoder.Varint()
	if n > maxHeaders && !s.batch.Own {
		rec.Key, rec.Value = nil, nil
		return true, &TooLargeError{fmt.Sprintf("%d headers; at most %d can be read", n, maxHeaders)}
	}
	for ; n > 0 && !decoder.Bad; n-- {
		rec.Headers = append(rec.Headers, record.Header{Key: decoder.Field(), Value: decoder.Field()})
	}
	if decoder.Bad {
		return false, recordError(io.ErrUnexpectedEOF)
	}
	return true, nil
}

// readPrefix reads the fields before the key into record, and clears the others.
func (s *Stream) readPrefix(record *Record, decoder *response.Decoder) {
	decoder.Skip(1) // attributes
	*record = Record{TimeMS: s.batch.firstMS + decoder.Varint(), Headers: record.Headers[:0]}
	if s.batch.HasAppendTime() {
		record.TimeMS = s.batch.maxMS
	}
	record.Offset = s.batch.Base + decoder.Varint()
}

// readBytes returns the next n bytes. A large n is only a claim, so its memory grows with the bytes that
// arrive.
func (s *Stream) readBytes(n int) ([]byte, error) {
	if n <= 1<<20 {
		data := make([]byte, n)
		_, err := io.ReadFull(s.reader, data)
		return data, err
	}
	var buffer bytes.Buffer
	_, err := io.CopyN(&buffer, s.reader, int64(n))
	return buffer.Bytes(), err
}

func (s *Stream) discardBytes(n int64) error {
	if _, err := io.CopyN(io.Discard, s.reader, n); err != nil {
		return recordError(err)
	}
	return nil
}

// recordError returns the error of a record that could not be read because of err.
func recordError(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errors.New("a record ends too early")
	}
	return fmt.Errorf("decompressing a batch: %w", err)
}

const (
	// maxWindow is the largest zstd window, as in Kafka's own client.
	maxWindow = 128 << 20
	// usualWindow is the largest window of pooled decoders. Only one batch with a larger window is read
	// at a time.
	usualWindow = 8 << 20
)

var (
	wideWindow   sync.Mutex
	zstdDecoders = sync.Pool{New: func() any {
		d, err := newZstdDecoder(nil, usualWindow)
		if err != nil {
			return err
		}
		return d
	}}
)

// newZstdDecoder returns a decoder that rejects frames with a larger window. A frame of a single segment has its content as
// its window.
func newZstdDecoder(reader io.Reader, window uint64) (*zstd.Decoder, error) {
	return zstd.NewReader(reader,
		zstd.WithDecoderConcurrency(1),
		zstd.WithDecoderLowmem(true),
		zstd.WithDecoderMaxWindow(window),
		zstd.WithDecoderMaxMemory(window))
}

// openDecompressor returns a reader of the decompressed bytes of data. The caller must call release when it
// has finished reading.
func openDecompressor(kind compress.Compression, data []byte) (plain io.Reader, release func(), err error) {
	switch kind {
	case compress.None:
		return bytes.NewReader(data), func() {}, nil
	case compress.Snappy:
		return &snappyReader{b: data}, func() {}, nil
	case compress.Zstd:
		return openZstd(data)
	default:
	}

	codec := kind.Codec()
	if codec == nil {
		return nil, nil, fmt.Errorf("compression %d is unknown", kind)
	}
	reader := codec.NewReader(bytes.NewReader(data))
	return reader, func() { _ = reader.Close() }, nil
}

// openZstd is openDecompressor for zstd.
func openZstd(data []byte) (io.Reader, func(), error) {
	reader := &zstdReader{b: data}
	if err := reader.openUsual(); err != nil {
		return nil, nil, err
	}
	return reader, reader.close, nil
}

// zstdReader decompresses a batch, whose frames may have windows of different sizes. It begins with a pooled decoder for
// usual windows. At a frame with a larger one it blocks until no other such batch is read, and continues with a decoder of
// its own.
type zstdReader struct {
	b       []byte
	decoder *zstd.Decoder
	read    int64 // bytes that were returned
	wide    bool  // the decoder accepts any window, and wideWindow is locked
}

func (r *zstdReader) openUsual() error {
	if windowOf(r.b) > usualWindow {
		return r.openWide()
	}
	decoder, ok := zstdDecoders.Get().(*zstd.Decoder)
	if !ok {
		return errors.New("no zstd decoder could be created")
	}
	if err := decoder.Reset(bytes.NewReader(r.b)); err != nil {
		return err
	}
	r.decoder = decoder
	return nil
}

// windowOf returns the size of the window of the first frame, or 0 if it has no valid header.
func windowOf(data []byte) uint64 {
	var header zstd.Header
	switch err := header.Decode(data); {
	case err != nil:
		return 0
	case header.SingleSegment:
		return header.FrameContentSize
	}
	return header.WindowSize
}

// openWide continues with a decoder for any window.
func (r *zstdReader) openWide() error {
	r.close()
	wideWindow.Lock()
	decoder, err := newZstdDecoder(bytes.NewReader(r.b), maxWindow)
	if err != nil {
		wideWindow.Unlock()
		return err
	}
	r.decoder, r.wide = decoder, true
	// The frames before were read already.
	_, err = io.CopyN(io.Discard, decoder, r.read)
	return err
}

func (r *zstdReader) Read(buffer []byte) (int, error) {
	n, err := r.decoder.Read(buffer)
	if n == 0 && !r.wide && (errors.Is(err, zstd.ErrWindowSizeExceeded) || errors.Is(err, zstd.ErrDecoderSizeExceeded)) {
		if err := r.openWide(); err != nil {
			return 0, err
		}
		n, err = r.decoder.Read(buffer)
	}
	r.read += int64(n)
	return n, err
}

func (r *zstdReader) close() {
	switch {
	case r.decoder == nil:
	case r.wide:
		// The large buffer of this decoder is not kept for the next batch.
		r.decoder.Close()
		wideWindow.Unlock()
	default:
		_ = r.decoder.Reset(nil)
		zstdDecoders.Put(r.decoder)
	}
	r.decoder, r.wide = nil, false
}

// snappyReader reads either one block, or blocks with their lengths before them, as Java's client frames
// them.
type snappyReader struct {
	b       []byte
	framed  bool
	started bool
	plain   []byte
}

// xerialMagic starts the framing of Java's client. Two numbers of four bytes follow.
var xerialMagic = []byte{0x82, 'S', 'N', 'A', 'P', 'P', 'Y', 0}

func (s *snappyReader) Read(buffer []byte) (int, error) {
	if !s.started {
		s.started = true
		// Kafka's Java client writes blocks behind a magic number, and other clients write one plain block.
		if s.framed = bytes.HasPrefix(s.b, xerialMagic); s.framed {
			s.b = s.b[min(len(xerialMagic)+8, len(s.b)):]
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
		if err := s.decodeBlock(block); err != nil {
			return 0, err
		}
	}

	n := copy(buffer, s.plain)
	s.plain = s.plain[n:]
	return n, nil
}

// decodeBlock decodes a block into s.plain. It rejects a block that claims more bytes than snappy can
// encode in it: three bytes encode at most 64.
func (s *snappyReader) decodeBlock(block []byte) (err error) {
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
