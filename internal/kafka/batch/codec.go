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

const none = 0

// Codec is one way to compress the records of a batch. It is safe for concurrent use.
type Codec struct {
	name     string
	id       int8
	compress func(dst, src []byte) ([]byte, error) // appends
}

var codecs = []*Codec{
	{name: "none", id: none},
	stream("gzip", 1, &gzip.Codec{}),
	stream("snappy", 2, &snappy.Codec{Framing: snappy.Framed, Compression: snappy.FasterCompression}),
	stream("lz4", 3, lz4Codec{}),
	{name: "zstd", id: 4, compress: zstdCompress},
}

// None leaves records as they are.
func None() *Codec { return codecs[none] }

// ParseCodec finds a codec by name: none, gzip, snappy, lz4 or zstd; "" is none.
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

// IsNone reports whether records stay as they are.
func (c *Codec) IsNone() bool { return c.id == none }

type writers interface {
	NewWriter(w io.Writer) io.WriteCloser
}

func stream(name string, id int8, c writers) *Codec {
	return &Codec{
		name: name, id: id,
		compress: func(dst, src []byte) ([]byte, error) {
			a := appender{dst}
			w := c.NewWriter(&a)
			if _, err := w.Write(src); err != nil {
				return nil, fmt.Errorf("compressing with %s: %w", name, err)
			}
			if err := w.Close(); err != nil {
				return nil, fmt.Errorf("compressing with %s: %w", name, err)
			}
			return a.p, nil
		},
	}
}

type appender struct{ p []byte }

func (a *appender) Write(p []byte) (int, error) {
	a.p = append(a.p, p...)
	return len(p), nil
}

// lz4Codec writes frames of small independent blocks: the library's default block of 4 MiB costs that much memory for
// each writer.
type lz4Codec struct{}

var lz4Writers = sync.Pool{New: func() any {
	w := lz4.NewWriter(io.Discard)
	if err := w.Apply(lz4.BlockSizeOption(lz4.Block256Kb), lz4.ChecksumOption(false)); err != nil {
		panic(err) // constant options of the library
	}
	return w
}}

type lz4Writer struct{ *lz4.Writer }

func (lz4Codec) NewWriter(w io.Writer) io.WriteCloser {
	z, _ := lz4Writers.Get().(*lz4.Writer)
	z.Reset(w)
	return lz4Writer{z}
}

func (w lz4Writer) Close() error {
	err := w.Writer.Close()
	w.Reset(io.Discard)
	lz4Writers.Put(w.Writer)
	return err
}

// The zstd library's one-shot calls need no writer for each batch and do not allocate; its state is made on first use,
// because it is large.
var zstdEncoder = sync.OnceValues(func() (*zstd.Encoder, error) {
	return zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(2), zstd.WithZeroFrames(true))
})

func zstdCompress(dst, src []byte) ([]byte, error) {
	e, err := zstdEncoder()
	if err != nil {
		return nil, fmt.Errorf("compressing with zstd: %w", err)
	}
	return e.EncodeAll(src, dst), nil
}
