package changes

import (
	"encoding/binary"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/resume"
)

// Op is the kind of a change event. The zero value is a kind that the stream does not request.
type Op uint8

// The kinds of events that a stream delivers.
const (
	Other Op = iota
	Insert
	Drop
	Rename
	DropDatabase
	Invalidate
)

var opNames = [...]string{"other", "insert", "drop", "rename", "dropDatabase", "invalidate"}

func (o Op) String() string {
	if int(o) < len(opNames) {
		return opNames[o]
	}
	return opNames[Other]
}

// Event is one parsed change event. Its slices alias the raw event, and so the whole response. A caller
// that keeps a slice longer than the batch must copy it.
type Event struct {
	Op Op

	// Token is the resume token, the whole `_id` document.
	Token []byte
	// Pos is the part of its text that all versions of MongoDB write alike ([resume.AppendOperation]), whose byte order is the order of the
	// stream. It is the `pos` of a waiting envelope (N15). It stays until the next event is parsed into the Event.
	Pos    []byte
	posBuf []byte

	// Document is the inserted document. HasDocument is false for other kinds of events. It is also
	// false for an insert that did not fit an event and was gone when it was fetched (N24). Note then
	// gives the reason.
	Document    []byte
	HasDocument bool
	Note        []byte

	// IDType and ID are the type and the raw value of the document's `_id`.
	IDType byte
	ID     []byte

	// ClusterTime is the commit time in the order of the oplog. All events of a transaction share it.
	// WallMS is the server's wall clock at the commit, in Unix milliseconds.
	ClusterTime bson.Timestamp
	WallMS      int64

	// DB and Coll name the collection. Coll is empty for a dropDatabase, and both are empty for an
	// invalidate.
	DB, Coll []byte

	// ToDB and ToColl are the new name of a renamed collection.
	ToDB, ToColl []byte

	UUID    [16]byte // of the collection, if HasUUID
	HasUUID bool
}

// NoteField is the name of Event.Note in the rebuilt event of a document that could not be fetched.
const NoteField = "outrelayNote"

var (
	errNotAnEvent = errors.New("no _id or no operationType")
	errTruncated  = errors.New("truncated BSON")
)

// Parse reads a raw change event into ev in one pass. It allocates only if it fails, and once for each Event. It reads only
// the fields of Event and does not validate the others. It does not parse the inserted document.
func Parse(raw []byte, ev *Event) error {
	*ev = Event{posBuf: ev.posBuf[:0]}
	data, ok := envelope.Elements(raw)
	for ok && len(data) > 0 {
		var (
			typ       bson.Type
			name, val []byte
		)
		if typ, name, val, data, ok = envelope.SplitElement(data); !ok {
			break
		}
		if err := ev.setField(typ, name, val); err != nil {
			return fmt.Errorf("parsing %q of a change event: %w", name, err)
		}
	}

	if !ok {
		return fmt.Errorf("parsing change event: %w", errTruncated)
	}
	if ev.Token == nil || ev.Op == Other {
		return fmt.Errorf("parsing change event: %w", errNotAnEvent)
	}
	if ev.Op == unknownOp {
		ev.Op = Other
	}
	if ev.WallMS == 0 {
		// Servers before 6.0 send no wallTime.
		ev.WallMS = int64(ev.ClusterTime.T) * 1000
	}
	return nil
}

func (ev *Event) setField(typ bson.Type, name, val []byte) error {
	switch string(name) {
	case "_id":
		if typ != bson.TypeEmbeddedDocument {
			return nil
		}
		ev.Token = val
		dataType, data, err := lookupField(val, "_data")
		if dataType == bson.TypeString {
			ev.posBuf = resume.AppendOperation(ev.posBuf, envelope.StringBytes(data))
			ev.Pos = ev.posBuf
		}
		return err

	case "operationType":
		if typ == bson.TypeString {
			ev.setOp(envelope.StringBytes(val))
		}

	case "clusterTime":
		if typ == bson.TypeTimestamp {
			ev.ClusterTime = bson.Timestamp{T: binary.LittleEndian.Uint32(val[4:]), I: binary.LittleEndian.Uint32(val)}
		}

	case "wallTime":
		if typ == bson.TypeDateTime {
			ev.WallMS = int64(binary.LittleEndian.Uint64(val))
		}

	case "collectionUUID":
		if typ == bson.TypeBinary && len(val) == 5+16 {
			ev.UUID, ev.HasUUID = [16]byte(val[5:]), true
		}

	case "fullDocument":
		if typ == bson.TypeEmbeddedDocument {
			ev.Document, ev.HasDocument = val, true
		}

	case "ns":
		if typ == bson.TypeEmbeddedDocument {
			return readNamespace(val, &ev.DB, &ev.Coll)
		}

	case "to":
		if typ == bson.TypeEmbeddedDocument {
			return readNamespace(val, &ev.ToDB, &ev.ToColl)
		}

	case "documentKey":
		if typ == bson.TypeEmbeddedDocument {
			idType, id, err := lookupField(val, "_id")
			ev.IDType, ev.ID = byte(idType), id
			return err
		}

	case NoteField:
		if typ == bson.TypeString {
			ev.Note = envelope.StringBytes(val)
		}
	}
	return nil
}

// unknownOp marks an operationType that exists but is not one of the constants, to distinguish it
// from a missing one.
const unknownOp Op = 0xff

func (ev *Event) setOp(name []byte) {
	// Nearly all events are inserts, which come first.
	for op := Insert; op <= Invalidate; op++ {
		if string(name) == opNames[op] {
			ev.Op = op
			return
		}
	}
	ev.Op = unknownOp
}

// lookupField returns a field of a document. typ is 0 if the field does not exist.
func lookupField(doc []byte, field string) (typ bson.Type, val []byte, err error) {
	data, ok := envelope.Elements(doc)
	for ok && len(data) > 0 {
		var name []byte
		typ, name, val, data, ok = envelope.SplitElement(data)
		if ok && string(name) == field {
			return typ, val, nil
		}
	}
	if !ok {
		return 0, nil, errTruncated
	}
	return 0, nil, nil
}

func readNamespace(doc []byte, db, coll *[]byte) error {
	typ, val, err := lookupField(doc, "db")
	if typ == bson.TypeString {
		*db = envelope.StringBytes(val)
	}
	if err != nil {
		return err
	}

	typ, val, err = lookupField(doc, "coll")
	if typ == bson.TypeString {
		*coll = envelope.StringBytes(val)
	}
	return err
}
