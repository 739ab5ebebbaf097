package changestream

import (
	"encoding/binary"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// Op is the kind of a change event. The zero value is a kind that the stream does not ask for.
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

// Event is one parsed change event. Its slices alias the raw event, and with it the whole reply that it came in: whoever
// keeps one beyond the batch copies it.
type Event struct {
	Op Op
	// Token is the resume token, the whole `_id` document; Data is the hexadecimal text in it, whose byte order is the
	// order of the stream (N15's `pos`).
	Token, Data []byte
	// Document is the inserted document; HasDocument is false for other kinds of events, and for an insert that did not fit
	// an event and was gone when it was fetched (N24), of which Note then tells.
	Document    []byte
	HasDocument bool
	Note        []byte
	// IDType and ID are the type and the raw value of the document's `_id`.
	IDType byte
	ID     []byte
	// ClusterTime is the commit time in the order of the oplog, shared by all events of a transaction; WallMS is the
	// server's wall clock at the commit, in Unix milliseconds.
	ClusterTime bson.Timestamp
	WallMS      int64
	// DB and Coll name the collection; Coll is empty for a dropDatabase, both are for an invalidate.
	DB, Coll []byte
	// ToDB and ToColl are the new name, for a rename.
	ToDB, ToColl []byte
	UUID         [16]byte // of the collection, if HasUUID
	HasUUID      bool
}

// noteField carries Event.Note in the rebuilt event of a document that could not be fetched.
const noteField = "outrelayNote"

var errNotAnEvent = errors.New("no _id or no operationType")

// Parse reads a raw change event into ev in one pass, without allocating unless it fails. It reads what it needs and does
// not validate the rest: the inserted document is cut out, not looked into.
func Parse(raw []byte, ev *Event) error {
	*ev = Event{}
	b, err := body(raw)
	if err != nil {
		return fmt.Errorf("parsing change event: %w", err)
	}
	for len(b) > 0 {
		var (
			typ       byte
			name, val []byte
		)
		if typ, name, val, b, err = element(b); err != nil {
			return fmt.Errorf("parsing change event: %w", err)
		}
		if err = ev.field(typ, name, val); err != nil {
			return fmt.Errorf("parsing %q of a change event: %w", name, err)
		}
	}
	if ev.Token == nil || ev.Op == Other {
		return fmt.Errorf("parsing change event: %w", errNotAnEvent)
	}
	if ev.Op == unknown {
		ev.Op = Other
	}
	if ev.WallMS == 0 {
		ev.WallMS = int64(ev.ClusterTime.T) * 1000 // servers before 6.0 send no wallTime
	}
	return nil
}

func (ev *Event) field(typ byte, name, val []byte) (err error) {
	switch string(name) {
	case "_id":
		if typ != typeDocument {
			return nil
		}
		ev.Token = val
		dataType, data, err := lookup(val, "_data")
		if dataType == typeString {
			ev.Data = text(data)
		}
		return err
	case "operationType":
		if typ == typeString {
			ev.setOp(text(val))
		}
	case "clusterTime":
		if typ == typeTimestamp {
			ev.ClusterTime = bson.Timestamp{T: binary.LittleEndian.Uint32(val[4:]), I: binary.LittleEndian.Uint32(val)}
		}
	case "wallTime":
		if typ == typeDate {
			ev.WallMS = int64(binary.LittleEndian.Uint64(val))
		}
	case "collectionUUID":
		if typ == typeBinary && len(val) == 5+16 {
			ev.UUID, ev.HasUUID = [16]byte(val[5:]), true
		}
	case "fullDocument":
		if typ == typeDocument {
			ev.Document, ev.HasDocument = val, true
		}
	case "ns":
		if typ == typeDocument {
			return namespace(val, &ev.DB, &ev.Coll)
		}
	case "to":
		if typ == typeDocument {
			return namespace(val, &ev.ToDB, &ev.ToColl)
		}
	case "documentKey":
		if typ == typeDocument {
			ev.IDType, ev.ID, err = lookup(val, "_id")
			return err
		}
	case noteField:
		if typ == typeString {
			ev.Note = text(val)
		}
	}
	return nil
}

// unknown marks an operationType that was there but is none of ours, to tell it from a missing one.
const unknown Op = 0xff

func (ev *Event) setOp(name []byte) {
	switch string(name) {
	case "insert":
		ev.Op = Insert
	case "drop":
		ev.Op = Drop
	case "rename":
		ev.Op = Rename
	case "dropDatabase":
		ev.Op = DropDatabase
	case "invalidate":
		ev.Op = Invalidate
	default:
		ev.Op = unknown
	}
}

// lookup finds a field of a document; typ is 0 if there is none.
func lookup(doc []byte, field string) (typ byte, val []byte, err error) {
	b, err := body(doc)
	for err == nil && len(b) > 0 {
		var name []byte
		if typ, name, val, b, err = element(b); err == nil && string(name) == field {
			return typ, val, nil
		}
	}
	return 0, nil, err
}

func namespace(doc []byte, db, coll *[]byte) error {
	typ, val, err := lookup(doc, "db")
	if typ == typeString {
		*db = text(val)
	}
	if err != nil {
		return err
	}
	typ, val, err = lookup(doc, "coll")
	if typ == typeString {
		*coll = text(val)
	}
	return err
}
