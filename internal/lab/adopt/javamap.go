package adopt

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
)

// Bounds of an offset file. The file of a large Connect cluster has some thousand entries of a few hundred bytes.
const (
	maxFile    = 64 << 20
	maxEntries = 1 << 20
)

// Markers of Java's serialization.
const (
	javaNull      = 0x70
	javaReference = 0x71
	javaClass     = 0x72
	javaObject    = 0x73
	javaArray     = 0x75
	javaBlock     = 0x77
	javaEnd       = 0x78
)

// errNotOffsets is the error for a file that Kafka Connect did not write.
var errNotOffsets = errors.New("the file is not an offset file of Kafka Connect (offset.storage.file.filename), " +
	"which is a serialized java.util.HashMap of byte arrays")

// readOffsetFile reads an offset file of Kafka Connect in standalone mode.
func readOffsetFile(path string) ([]rawOffset, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()

	data, err := io.ReadAll(io.LimitReader(file, maxFile+1))
	if err != nil {
		return nil, fmt.Errorf("reading the offset file: %w", err)
	}
	// A file this large is no offset file. The limit protects against a wrong path.
	if len(data) > maxFile {
		return nil, fmt.Errorf("reading %s: it has more than %d bytes; %w", path, maxFile, errNotOffsets)
	}
	list, err := parseJavaMap(data)
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", path, err)
	}
	return list, nil
}

// javaReader reads a serialized value. After the first error, bad stays set and every read returns zero.
type javaReader struct {
	rest []byte
	bad  bool
}

func (r *javaReader) take(n int) []byte {
	if r.bad || n < 0 || n > len(r.rest) {
		r.bad = true
		return make([]byte, min(max(n, 0), 8))
	}
	taken := r.rest[:n]
	r.rest = r.rest[n:]
	return taken
}

func (r *javaReader) byte() byte { return r.take(1)[0] }
func (r *javaReader) int() int   { return int(int32(binary.BigEndian.Uint32(r.take(4)))) }
func (r *javaReader) text() string {
	n := int(binary.BigEndian.Uint16(r.take(2)))
	return string(r.take(n))
}

func (r *javaReader) expect(want ...byte) {
	if !bytes.Equal(r.take(len(want)), want) {
		r.bad = true
	}
}

// readClass reads the description of a class, which must have this name, flags and number of primitive fields.
func (r *javaReader) readClass(name string, flags byte, fields int) {
	r.expect(javaClass)
	if r.text() != name {
		r.bad = true
	}
	r.take(8) // version
	r.expect(flags)
	if int(binary.BigEndian.Uint16(r.take(2))) != fields {
		r.bad = true
	}

	// The values of these fields follow later; here are only their types and names.
	for range fields {
		r.byte()
		r.text()
	}
	r.expect(javaEnd, javaNull)
}

// byteArray reads an array of bytes, or null. The first array describes its class, and the others refer to it.
func (r *javaReader) byteArray() []byte {
	switch r.byte() {
	case javaNull:
		return nil
	case javaArray:
	default:
		r.bad = true
		return nil
	}

	if len(r.rest) > 0 && r.rest[0] == javaReference {
		r.take(5)
	} else {
		r.readClass("[B", 2, 0)
	}
	return r.take(r.int())
}

// parseJavaMap parses a serialized HashMap<byte[], byte[]>. It creates no objects, and reads nothing beyond data.
func parseJavaMap(data []byte) ([]rawOffset, error) {
	// The header and the class description are fixed for this type, so any difference is another file.
	reader := &javaReader{rest: data}
	reader.expect(0xac, 0xed, 0, 5)
	reader.expect(javaObject)
	reader.readClass("java.util.HashMap", 3, 2)
	reader.take(8) // load factor and threshold
	reader.expect(javaBlock, 8)
	reader.take(4) // capacity
	n := reader.int()
	if n < 0 || n > maxEntries {
		reader.bad = true
	}

	var list []rawOffset
	for range n {
		if reader.bad {
			break
		}
		list = append(list, rawOffset{key: reader.byteArray(), value: reader.byteArray()})
	}
	reader.expect(javaEnd)
	if reader.bad {
		return nil, errNotOffsets
	}
	return list, nil
}
