package envelope

import (
	"bytes"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
)

// Headers contains the headers of a stored envelope in their order. Several headers may have the
// same name. The zero value contains none.
type Headers struct {
	raw   []byte // an array of {k, v}, or a document of strings
	isDoc bool
}

// Iter returns an iterator over the headers. It does not allocate:
//
//	for it := v.Headers.Iter(); it.Next(); { use(it.Key, it.Value) }
func (h Headers) Iter() HeaderIter {
	if h.raw == nil {
		return HeaderIter{}
	}
	cursor, _ := openDocument(h.raw)
	return HeaderIter{c: cursor, isDoc: h.isDoc}
}

// HeaderIter iterates over Headers. Key and Value are set by Next and alias the envelope.
type HeaderIter struct {
	Key   []byte
	Value []byte // nil for a null value

	c       cursor
	isDoc   bool
	problem string // why the headers are invalid, or ""
}

// Next advances to the next header. It returns false at the end, and at an invalid header.
func (it *HeaderIter) Next() bool {
	if !it.c.next() {
		return false
	}
	if it.isDoc {
		it.Key = it.c.name
		return it.setValue(it.c.typ, it.c.val)
	}
	return it.readPair()
}

// readPair reads one {k, v} of the array form into it. It returns false if the pair is invalid.
func (it *HeaderIter) readPair() bool {
	it.Key, it.Value = nil, nil
	if it.c.typ != bson.TypeEmbeddedDocument {
		return it.stop("an element of headers is not a document {k, v}")
	}

	cursor, ok := openDocument(it.c.val)
	if !ok {
		return it.stop("an element of headers is broken")
	}

	var hasKey, hasValue bool
	for cursor.next() {
		switch string(cursor.name) {
		case "k":
			if cursor.typ != bson.TypeString || hasKey {
				return it.stop("k of a header is not one string")
			}
			it.Key, hasKey = StringBytes(cursor.val), true
		case "v":
			if hasValue || !it.setValue(cursor.typ, cursor.val) {
				return it.stop("v of a header is not one binary, string or null")
			}
			hasValue = true
		default:
			return it.stop("a header has a field other than k and v")
		}
	}

	switch {
	case cursor.broken:
		return it.stop("an element of headers is broken")
	case !hasKey:
		return it.stop("a header has no k")
	}

	return true
}

// setValue sets it.Value. It returns false if the type cannot be a header value.
func (it *HeaderIter) setValue(bsonType bson.Type, val []byte) bool {
	switch bsonType {
	case bson.TypeString:
		it.Value = StringBytes(val)
		return true
	case bson.TypeBinary:
		if data, _, ok := binaryData(val); ok {
			it.Value = data
			return true
		}
	case bson.TypeNull:
		it.Value = nil
		return true
	}

	return it.stop("the value of a header is not a binary, a string or null")
}

// stop ends the iteration because of a problem. It returns false.
func (it *HeaderIter) stop(problem string) bool {
	it.problem = problem

	// Without a rest, Next returns false from now on.
	it.c.rest = nil
	return false
}

// reservedPrefix begins the names of headers that the relay sets.
var reservedPrefix = []byte(record.ReservedPrefix)

// HeaderProblem returns why name must not be the name of a header of a user, or "". N7
func HeaderProblem(name []byte) string {
	switch {
	case len(name) == 0:
		return "a header without a name"
	case string(name) == record.HeaderID:
		return "header id is the event's own"
	case bytes.HasPrefix(name, reservedPrefix):
		return "headers named outrelay-* are reserved"
	}
	return ""
}

// check iterates over all headers. It returns a rejection for the first problem, or if there are too many.
func (h Headers) check() error {
	if _, ok := openDocument(h.raw); !ok {
		return newMalformed("headers are broken")
	}

	n := 0
	it := h.Iter()
	for it.Next() {
		n++
		if problem := HeaderProblem(it.Key); problem != "" {
			return newMalformed("%s", problem)
		}
		if len(it.Key) > MaxFieldText {
			return newTooLarge("the name of a header has %d bytes; at most %d are allowed", len(it.Key), MaxFieldText)
		}
	}

	switch {
	case it.c.broken:
		return newMalformed("headers are broken")
	case it.problem != "":
		return newMalformed("%s", it.problem)
	case n > record.MaxHeaders:
		return newTooLarge("there are %d headers; at most %d are allowed", n, record.MaxHeaders)
	}
	return nil
}
