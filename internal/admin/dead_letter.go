package admin

import (
	"encoding/json"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/deadletter"
)

// DeadLetter is a dead letter for people and programs.
type DeadLetter struct {
	Collection    string        `json:"collection"`
	ID            string        `json:"id"`
	Delivery      int32         `json:"delivery"`
	Version       int32         `json:"version"` // an edit names it
	AggregateType string        `json:"aggregate_type,omitempty"`
	Type          string        `json:"type,omitempty"`
	Key           string        `json:"key,omitempty"`
	Topic         string        `json:"topic,omitempty"`
	Partition     *int32        `json:"partition,omitempty"`
	Class         string        `json:"class"`
	Reason        string        `json:"reason"`
	Position      string        `json:"position,omitempty"`
	Size          int           `json:"size"` // bytes of the envelope
	Source        DeadSource    `json:"source"`
	Attempts      []DeadAttempt `json:"attempts"`
	FirstFailure  time.Time     `json:"first_failure"`
	LastFailure   time.Time     `json:"last_failure"`
	DiedAt        time.Time     `json:"died_at"`
	ReplayOf      string        `json:"replay_of,omitempty"`
	Replayed      *DeadReplayed `json:"replayed,omitempty"`
	// Envelope is relaxed Extended JSON, in DeadShow only.
	Envelope json.RawMessage `json:"envelope,omitempty"`
}

// DeadSource is who gave the envelope up.
type DeadSource struct {
	Kind    string `json:"kind"` // relay or handler
	Watcher string `json:"watcher,omitempty"`
	Group   string `json:"group,omitempty"`
	Handler string `json:"handler,omitempty"`
	Node    string `json:"node,omitempty"`
	Epoch   int64  `json:"epoch,omitempty"`
	Version string `json:"version,omitempty"`
}

// DeadAttempt is one failed delivery.
type DeadAttempt struct {
	At     time.Time `json:"at"`
	Topic  string    `json:"topic,omitempty"`
	Class  string    `json:"class"`
	Reason string    `json:"reason"`
	Node   string    `json:"node,omitempty"`
}

// DeadReplayed says that a letter was requeued.
type DeadReplayed struct {
	At       time.Time `json:"at"`
	Actor    string    `json:"actor"`
	Delivery int32     `json:"delivery"` // the one that it became
	Run      string    `json:"run"`      // the action, as in the events log
	Edited   []string  `json:"edited,omitempty"`
}

func letter(d *deadletter.Dead) DeadLetter {
	out := DeadLetter{
		Collection: d.ID.NS, ID: d.ID.Text(), Delivery: d.ID.Delivery, Version: d.Version,
		AggregateType: d.AggregateType, Type: d.Type, Key: d.Key, Topic: d.Topic, Partition: d.Partition,
		Class: string(d.Class), Reason: d.Reason, Position: d.Pos, Size: d.Size, Source: DeadSource(d.Source), Attempts: []DeadAttempt{},
		FirstFailure: d.FirstFailure, LastFailure: d.LastFailure, DiedAt: d.MovedAt, ReplayOf: d.ReplayOf,
	}
	for _, a := range d.Attempts {
		out.Attempts = append(out.Attempts, DeadAttempt{a.At, a.Topic, string(a.Class), a.Reason, a.Node})
	}
	if r := d.Replayed; r != nil {
		out.Replayed = &DeadReplayed{At: r.At, Actor: r.Actor, Delivery: r.Delivery, Run: r.Run, Edited: r.Edited}
	}
	return out
}

// shown are the fields of an envelope that hold no business data.
var shown = append(slices.DeleteFunc(deadletter.Editable(), func(f string) bool { return f == "payload" }),
	"_id", "ts", "slot", "dueAt", "scheduledFor", "state", "pos", "pending", "attempts", "nextAt", "origin", "delivery", "replayOf", "sentAt")

// hidden stands for a value that was not asked for.
type hidden struct {
	Hidden bool   `bson:"hidden"`
	Type   string `bson:"type"`
	Bytes  int    `bson:"bytes"`
}

// envelopeJSON is the envelope as relaxed Extended JSON, nil if it cannot be written as such.
func envelopeJSON(raw bson.Raw, all bool) json.RawMessage {
	elems, err := raw.Elements()
	if err != nil {
		return nil
	}
	doc := make(bson.D, 0, len(elems))
	for _, e := range elems {
		var v any = e.Value()
		if !all && !slices.Contains(shown, e.Key()) && e.Value().Type != bson.TypeNull {
			v = hidden{true, e.Value().Type.String(), sizeOf(e.Value())}
		}
		doc = append(doc, bson.E{Key: e.Key(), Value: v})
	}
	out, err := bson.MarshalExtJSON(doc, false, false)
	if err != nil || !json.Valid(out) {
		return nil
	}
	return out
}

// sizeOf is the bytes of a value, those of a string or a binary without their framing.
func sizeOf(v bson.RawValue) int {
	if s, ok := v.StringValueOK(); ok {
		return len(s)
	}
	if _, data, ok := v.BinaryOK(); ok {
		return len(data)
	}
	return len(v.Value)
}
