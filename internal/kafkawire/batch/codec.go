package batch

import (
	"fmt"
	"io"
	"strings"
	"sync"

	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
	"github.com/segmentio/kafka-go/compress/gzip"
	"github.com/segmentio/kafka-go/compress/snappy"
)

// noneID is the codec id of records that are not compressed.
const noneID = 0

// Codec compresses the records of a batch. It is safe for concurrent use.
type Codec struct {
	name     string
	id       int8
	compress func(dst, src []byte) ([]byte, error) // appends to dst
}

var codecs = []*Codec{
	{name: "none", id: noneID},
	newStreamCodec("gzip", 1, &gzip.Codec{}),
	newStreamCodec("snappy", 2, &snappy.Codec{Framing: snappy.Framed, Compression: snappy.FasterCompression}),
	newStreamCodec("lz4", 3, lz4Codec{}),
	{name: "zstd", id: 4, compress: zstdCompress},
}

// None returns the codec that does not compress.
func None() *Codec { return codecs[noneID] }

// ParseCodec returns the codec called name: none, gzip, snappy, lz4 or zstd. An empty name means none.
func ParseCodec(name string) (*Codec, error) {
	if name == "" {
		return None(), nil
	}

	names := make([]string, 0, len(codecs))
	for _, c := range codecs {
		if c.name == name {
			return c, nil
		}
		names = append(names, c.name)
	}
	return nil, fmt.Errorf("compression %q is not one of %s", name, strings.Join(names, ", "))
}

func (c *Codec) String() string { return c.name }

// IsNone reports whether the codec does not compress.
func (c *Codec) IsNone() bool { return c.id == noneID }

type writerFactory interface {
	NewWriter(w io.Writer) io.WriteCloser
}

// newStreamCodec returns a codec for a library that compresses with an io.Writer.
func newStreamCodec(name string, id int8, factory writerFactory) *Codec {
	return &Codec{
		name: name,
		id:   id,
		compress: func(dst, src []byte) ([]byte, error) {
			appender := appender{dst}
			writer := factory.NewWriter(&appender)

			if _, err := writer.Write(src); err != nil {
				return nil, fmt.Errorf("compressing with %s: %w", name, err)
			}
			if err := writer.Close(); err != nil {
				return nil, fmt.Errorf("compressing with %s: %w", name, err)
			}
			return appender.p, nil
		},
	}
}

// appender is an io.Writer that appends to p.
type appender struct{ p []byte }

func (a *appender) Write(data []byte) (int, error) {
	a.p = append(a.p, data...)
	return len(data), nil
}

// lz4Codec writes frames of small independent blocks. With the library's default block size, each
// writer would need 4 MiB of memory.
type lz4Codec struct{}

var lz4Writers = sync.Pool{New: func() any {
	w := lz4.NewWriter(io.Discard)
	if err := w.Apply(lz4.BlockSizeOption(lz4.Block256Kb), lz4.ChecksumOption(false)); err != nil {
		panic(err) // constant options of the library
	}
	return w
}}

type lz4Writer struct{ *lz4.Writer }

func (lz4Codec) NewWriter(out io.Writer) io.WriteCloser {
	writer, _ := lz4Writers.Get().(*lz4.Writer)
	writer.Reset(out)
	return lz4Writer{writer}
}

func (w lz4Writer) Close() error {
	err := w.Writer.Close()
	w.Reset(io.Discard)
	lz4Writers.Put(w.Writer)
	return err
}

// zstdEncoder returns the shared encoder. The library's one-shot calls need no writer for each batch,
// and do not allocate. The state of the encoder is large, so it is made on first use.
var zstdEncoder = sync.OnceValues(func() (*zstd.Encoder, error) {
	return zstd.NewWriter(nil,
		zstd.WithEncoderLevel(zstd.SpeedFastest),
		zstd.WithEncoderConcurrency(2),
		zstd.WithZeroFrames(true))
})

func zstdCompress(dst, src []byte) ([]byte, error) {
	encoder, err := zstdEncoder()
	if err != nil {
		return nil, fmt.Errorf("compressing with zstd: %w", err)
	}
	return encoder.EncodeAll(src, dst), nil
}
