package fetched

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"runtime"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
)

// zstdFrame returns a frame that is a single segment of n zeros after head, in blocks of one repeated byte.
func zstdFrame(head []byte, zeros int) []byte {
	f := []byte{0x28, 0xb5, 0x2f, 0xfd, 0xa0} // magic; single segment, content size of 4 bytes
	f = binary.LittleEndian.AppendUint32(f, uint32(len(head)+zeros))
	block := func(last, kind, size int) {
		v := uint32(last | kind<<1 | size<<3)
		f = append(f, byte(v), byte(v>>8), byte(v>>16))
	}
	block(0, 0, len(head))
	f = append(f, head...)
	for zeros > 0 {
		n := min(zeros, 128<<10)
		zeros -= n
		last := 0
		if zeros == 0 {
			last = 1
		}
		block(last, 1, n)
		f = append(f, 0)
	}
	return f
}

func zstdBatch(body []byte, records int) Batch {
	h := make([]byte, HeaderSize)
	be := binary.BigEndian
	be.PutUint32(h[8:], uint32(HeaderSize-12+len(body)))
	h[16] = 2
	be.PutUint16(h[21:], 4)
	be.PutUint32(h[23:], uint32(records-1))
	be.PutUint64(h[43:], ^uint64(0))
	be.PutUint32(h[57:], uint32(records))
	h = append(h, body...)
	be.PutUint32(h[17:], crc32.Checksum(h[21:], castagnoli))
	for b, err := range Batches(h) {
		if err == nil {
			return b
		}
	}
	panic("no batch")
}

// A single segment has no window in its header: its content size counts. Otherwise batches of 4 kB each would hold 120 MB at
// the same time.
func TestWideWindowsAreReadOneAtATime(t *testing.T) {
	const window = 120 << 20
	first := binary.AppendVarint(nil, window-1024) // the length of the only record
	frames := map[string][]byte{
		"first frame":  zstdFrame(first, window-len(first)),
		"second frame": append(zstdFrame(first, 10), zstdFrame(nil, window-len(first)-10)...),
	}
	for name, frame := range frames {
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		var open []*Stream
		for range 6 {
			b := zstdBatch(frame, 1)
			s, err := b.Stream()
			if err != nil {
				t.Fatal(err)
			}
			var x Record
			_, err = s.Next(&x, 0)
			if _, tooLarge := errors.AsType[*TooLargeError](err); !tooLarge {
				t.Errorf("%s: %v", name, err)
			}
			open = append(open, s)
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		if held := int64(after.HeapAlloc) - int64(before.HeapAlloc); held > 140<<20 {
			t.Errorf("%s: %d streams hold %d MiB", name, len(open), held>>20)
		}
		for _, s := range open {
			s.Close()
		}
	}

	// While one is read, another one waits.
	b := zstdBatch(frames["first frame"], 2)
	s, err := b.Stream()
	if err != nil {
		t.Fatal(err)
	}
	opened := make(chan struct{})
	go func() {
		defer close(opened)
		if other, err := b.Stream(); err == nil {
			other.Close()
		}
	}()
	select {
	case <-opened:
		t.Error("two streams with wide windows are open at the same time")
	case <-time.After(50 * time.Millisecond):
	}
	s.Close()
	<-opened
}

// The size of a batch does not matter if its window is usual.
func TestLongStreamsWithAUsualWindowAreRead(t *testing.T) {
	t.Parallel()
	var plain bytes.Buffer
	const records, size = 40, 1 << 20
	for i := range records {
		body := []byte{0, 0}
		body = binary.AppendVarint(body, int64(i))
		body = append(body, 1)
		body = binary.AppendVarint(body, size)
		body = append(append(body, make([]byte, size)...), 0)
		plain.Write(binary.AppendVarint(nil, int64(len(body))))
		plain.Write(body)
	}
	var packed bytes.Buffer
	w, err := zstd.NewWriter(&packed, zstd.WithWindowSize(1<<20))
	if err != nil {
		t.Fatal(err)
	}
	_, _ = w.Write(plain.Bytes())
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}

	b := zstdBatch(packed.Bytes(), records)
	s, err := b.Stream()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	n := 0
	var x Record
	for {
		more, err := s.Next(&x, 0)
		if err != nil {
			t.Fatal(n, err)
		}
		if !more {
			break
		}
		n++
	}
	if n != records {
		t.Errorf("%d records were read", n)
	}
}
