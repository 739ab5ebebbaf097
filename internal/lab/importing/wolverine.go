package importing

import (
	"encoding/binary"
	"errors"
)

// wolverineMessage is an envelope of Wolverine.
type wolverineMessage struct {
	headers []header
	data    []byte
}

// errWolverineBody is the error for a body that Wolverine's serializer did not write.
var errWolverineBody = errors.New("body: expected an envelope of Wolverine; found other bytes")

// parseWolverine parses a body: the time, the headers as pairs of texts, and the data.
func parseWolverine(data []byte) (wolverineMessage, error) {
	reader := &wolverineReader{rest: data}
	reader.take(8) // the time at which it was sent

	n := reader.int32()
	var message wolverineMessage
	// The number of headers is only a claim, so the bytes bound the loop.
	for range min(n, len(data)) {
		name, value := reader.text(), reader.text()
		message.headers = append(message.headers, header{name, &value})
	}

	message.data = reader.take(reader.int32())
	if reader.bad || n < 0 || n > len(data) || len(reader.rest) > 0 {
		return wolverineMessage{}, errWolverineBody
	}
	return message, nil
}

// get returns the value of a header, or "".
func (m wolverineMessage) get(name string) string {
	for _, h := range m.headers {
		if h.name == name && h.value != nil {
			return *h.value
		}
	}
	return ""
}

// wolverineReader reads the format of .NET's BinaryReader. After the first error, bad stays set and every read returns zero.
type wolverineReader struct {
	rest []byte
	bad  bool
}

func (r *wolverineReader) take(n int) []byte {
	if r.bad || n < 0 || n > len(r.rest) {
		r.bad = true
		return make([]byte, min(max(n, 0), 8))
	}
	taken := r.rest[:n]
	r.rest = r.rest[n:]
	return taken
}

func (r *wolverineReader) int32() int { return int(int32(binary.LittleEndian.Uint32(r.take(4)))) }

// text reads a text with its length in groups of seven bits.
func (r *wolverineReader) text() string {
	n, size := binary.Uvarint(r.rest)
	if size <= 0 || size > 5 {
		r.bad = true
		return ""
	}
	r.take(size)
	return string(r.take(int(min(n, 1<<31-1))))
}
