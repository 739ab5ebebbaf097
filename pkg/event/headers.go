package event

import (
	"bytes"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// Headers are the headers of a stored envelope, in their order; names may repeat. The zero value has none.
type Headers struct {
	raw   []byte // an array of {k, v}, or a document of strings
	isDoc bool
}

// Iter walks the headers without allocating:
//
//	for it := v.Headers.Iter(); it.Next(); { use(it.Key, it.Value) }
func (h Headers) Iter() HeaderIter {
	if h.raw == nil {
		return HeaderIter{}
	}
	c, _ := open(h.raw)
	return HeaderIter{c: c, isDoc: h.isDoc}
}

// HeaderIter is a walk over Headers.
type HeaderIter struct {
	Key   []byte
	Value []byte // nil for a null value

	c     cursor
	isDoc bool
	why   string // what is wrong, while Parse checks
}

// Next moves to the next header; false at the end.
func (it *HeaderIter) Next() bool {
	if !it.c.next() {
		return false
	}
	if it.isDoc {
		it.Key = it.c.name
		return it.value(it.c.typ, it.c.val)
	}
	return it.pair()
}

// pair reads one {k, v} of the array form.
func (it *HeaderIter) pair() bool {
	it.Key, it.Value = nil, nil
	if it.c.typ != bson.TypeEmbeddedDocument {
		return it.fail("an element of headers is not a document {k, v}")
	}
	e, ok := open(it.c.val)
	if !ok {
		return it.fail("an element of headers is broken")
	}
	var hasKey, hasValue bool
	for e.next() {
		switch string(e.name) {
		case "k":
			if e.typ != bson.TypeString || hasKey {
				return it.fail("k of a header is not one string")
			}
			it.Key, hasKey = text(e.val), true
		case "v":
			if hasValue || !it.value(e.typ, e.val) {
				return it.fail("v of a header is not one binary, string or null")
			}
			hasValue = true
		default:
			return it.fail("a header has a field other than k and v")
		}
	}
	switch {
	case e.bad:
		return it.fail("an element of headers is broken")
	case !hasKey:
		return it.fail("a header has no k")
	}
	return true
}

func (it *HeaderIter) value(t bson.Type, val []byte) bool {
	switch t {
	case bson.TypeString:
		it.Value = text(val)
		return true
	case bson.TypeBinary:
		if data, _, ok := blob(val); ok {
			it.Value = data
			return true
		}
	case bson.TypeNull:
		it.Value = nil
		return true
	}
	return it.fail("the value of a header is not a binary, a string or null")
}

func (it *HeaderIter) fail(why string) bool {
	it.why = why
	it.c.rest = nil
	return false
}

// reservedPrefix begins the names that are the relay's own.
var reservedPrefix = []byte("outrelay-")

// headerProblem says why name may not be a user's header, or "". N7
func headerProblem(name []byte) string {
	switch {
	case len(name) == 0:
		return "a header without a name"
	case string(name) == "id":
		return "header id is the event's own"
	case bytes.HasPrefix(name, reservedPrefix):
		return "headers named outrelay-* are reserved"
	}
	return ""
}

// check walks all headers once and says what is wrong with them, or "".
func (h Headers) check() string {
	if _, ok := open(h.raw); !ok {
		return "headers are broken"
	}
	it := h.Iter()
	for it.Next() {
		if why := headerProblem(it.Key); why != "" {
			return why
		}
	}
	if it.c.bad {
		return "headers are broken"
	}
	return it.why
}
