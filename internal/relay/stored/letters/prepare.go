package letters

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// Bounds of a letter.
const (
	maxInline = 15 << 20 // larger envelopes are stored in chunks: with the reason they do not fit a document (N20)
	chunkSize = 4 << 20

	maxReason = 8 << 10 // bytes of a reason, that of the letter and of each attempt
	maxTopic  = 1024    // bytes of the topic
	maxDepth  = 150     // of an envelope that is stored as a document
)

// Prepared is a letter that is ready to be written, except for the times, which come from the server.
type Prepared struct {
	raw          []byte
	dead         Dead
	firstAttempt bool // this failure is the only attempt
	firstFailure time.Time
	expire       time.Duration
}

// ID returns the `_id` of the letter.
func (p *Prepared) ID() string { return p.dead.ID }

// Rejection returns why the envelope is dead, and the topic; "" stands for all topics.
func (p *Prepared) Rejection() (why record.Rejection, topic string) {
	return record.Rejection{Class: p.dead.Class, Reason: p.dead.Reason}, p.dead.Topic
}

// Size returns roughly how many bytes the letter, without its chunks, adds to a transaction.
func (p *Prepared) Size() int {
	return len(p.dead.Envelope) + len(p.dead.Reason) + len(p.dead.Pos) + len(p.dead.Key) + 1024 + len(p.dead.Attempts)*256
}

// Prepare returns the letter to be stored. It fails only if the caller has made a mistake: a namespace that is not
// <database>.<collection>, or no watcher or class. It accepts every envelope: if one has no _id or is not BSON, the letter
// contains its bytes.
func Prepare(letter Letter) (*Prepared, error) {
	if err := letter.validate(); err != nil {
		return nil, err
	}

	valid := bson.Raw(letter.Raw).Validate() == nil
	id := letter.envelopeID(valid)
	prepared := letter.prepare(id)
	prepared.raw = letter.Raw
	prepared.dead.Size, prepared.dead.Digest = len(letter.Raw), DigestOf(letter.Raw)
	if valid {
		prepared.dead.Facts = readFacts(letter.Mapping.ToContract(letter.Raw))
		prepared.dead.Stamp = outboxes.Stamp(letter.Raw)
		prepared.dead.ReplayOf = cmp.Or(prepared.dead.ReplayOf, stringField(letter.Raw, "replayOf"))
	}
	if letter.Key != "" {
		prepared.dead.Key = record.Clip(letter.Key, maxFactBytes)
	}

	// MongoDB limits the size and the depth of a document, and the letter adds to both.
	if !valid || len(letter.Raw) > maxInline || exceedsDepth(letter.Raw, maxDepth) {
		prepared.dead.Chunks = (len(letter.Raw) + chunkSize - 1) / chunkSize
	} else {
		prepared.dead.Envelope = letter.Raw
	}
	return prepared, nil
}

// Minimal returns a letter with nothing but the id of the envelope, its place, and the reason. It is for a letter that
// MongoDB rejects with why. letter must be one that [Prepare] accepts.
func Minimal(letter Letter, why error) *Prepared {
	valid := bson.Raw(letter.Raw).Validate() == nil
	id := letter.envelopeID(valid)
	letter.Attempts = nil
	letter.Reason = "MongoDB rejects the dead letter (" + DescribeRejection(why) + "), so the envelope is not stored; " + letter.Reason

	prepared := letter.prepare(id)
	if valid {
		prepared.dead.Stamp = outboxes.Stamp(letter.Raw)
	}
	if id.Type != 0 && len(id.Value) <= maxIDBytes {
		// The error can be ignored: the id is BSON.
		prepared.dead.Envelope, _ = bson.Marshal(bson.D{{Key: "_id", Value: id}})
	}
	prepared.dead.Size = len(prepared.dead.Envelope)
	return prepared
}

// DescribeRejection returns why MongoDB rejects a document, without the text of the server, which may contain payload.
func DescribeRejection(why error) string {
	var bulk mongo.BulkWriteException
	if errors.As(why, &bulk) && len(bulk.WriteErrors) > 0 {
		return "code " + strconv.Itoa(bulk.WriteErrors[0].Code)
	}
	var command mongo.CommandError
	if errors.As(why, &command) {
		return fmt.Sprintf("%s, code %d", command.Name, command.Code)
	}
	if why == nil {
		return "unknown"
	}
	return record.Shorten(why.Error(), 200)
}

func (l *Letter) validate() error {
	db, coll, ok := strings.Cut(l.NS, ".")
	switch {
	case !ok || db == "" || coll == "":
		return fmt.Errorf("dead letter: namespace %q is not <database>.<collection>", l.NS)
	case l.Watcher == "":
		return fmt.Errorf("dead letter of %s: it has no watcher", l.NS)
	case l.Class == "":
		return fmt.Errorf("dead letter of %s: it has no class", l.NS)
	}
	return nil
}

// envelopeID returns the _id of the envelope. If the envelope has none, the type is 0 and the value is the whole
// envelope, so that [Letter.id] still distinguishes letters.
func (l *Letter) envelopeID(valid bool) bson.RawValue {
	if valid {
		if value, err := bson.Raw(l.Raw).LookupErr("_id"); err == nil {
			return value
		}
	}
	return bson.RawValue{Value: l.Raw}
}

// prepare returns the fields of the letter that do not come from the body of the envelope.
func (l *Letter) prepare(id bson.RawValue) *Prepared {
	prepared := &Prepared{firstAttempt: len(l.Attempts) == 0, firstFailure: l.FirstFailure, expire: l.Expire}
	prepared.dead = Dead{ID: l.id(id), Content: Content{
		Watcher:  l.Watcher,
		NS:       l.NS,
		Delivery: l.Delivery,
		Slot:     l.Slot,
		Pos:      ShortPos(l.Pos),
		Origin:   l.Origin,
		Class:    l.Class,
		Reason:   record.Clip(l.Reason, maxReason),
		Topic:    record.Clip(l.Topic, maxTopic),
		Source:   l.Source,
		Attempts: keepLatestAttempts(l),
		ReplayOf: record.Clip(l.ReplayOf, maxFactBytes),
	}}

	if id.Type != 0 {
		prepared.dead.EnvelopeID = ShortID(id)
	}
	if l.Partition >= 0 && l.Topic != "" {
		prepared.dead.Partition = &l.Partition
	}
	return prepared
}

// setTimes sets the times of a letter that is written at the server time now, and its failure.
func (p *Prepared) setTimes(now time.Time) {
	letter := &p.dead
	failure := record.FailureOf(letter.Reason, "relay", string(letter.Class), letter.Topic, letter.Type)
	letter.Fingerprint, letter.Failure = failure.Fingerprint, failure.Message
	letter.MovedAt = now
	if p.firstAttempt {
		letter.Attempts[0].At = now
	}

	letter.FirstFailure = p.firstFailure
	if letter.FirstFailure.IsZero() {
		letter.FirstFailure = letter.Attempts[0].At
	}
	letter.LastFailure = letter.Attempts[len(letter.Attempts)-1].At

	if p.expire > 0 {
		at := now.Add(p.expire)
		letter.ExpireAt = &at
	}
}

// exceedsDepth reports whether the documents in doc are nested deeper than limit, or cannot be
// parsed. The server rejects depths above 180, and the letter adds one.
func exceedsDepth(doc bson.Raw, limit int) bool {
	if limit == 0 {
		return true
	}
	elems, err := doc.Elements()
	if err != nil {
		return true
	}

	for _, e := range elems {
		value := e.Value()
		nested := value.Type == bson.TypeEmbeddedDocument || value.Type == bson.TypeArray
		if nested && exceedsDepth(value.Value, limit-1) {
			return true
		}
	}
	return false
}

// keepLatestAttempts returns the attempts of letter that are stored. If letter has none, it returns this
// failure as the only one.
func keepLatestAttempts(letter *Letter) []record.Attempt {
	if len(letter.Attempts) == 0 {
		return []record.Attempt{{
			Topic:  record.Clip(letter.Topic, maxTopic),
			Class:  letter.Class,
			Reason: record.Clip(letter.Reason, maxReason),
			Node:   letter.Source.Node,
		}}
	}

	latest := letter.Attempts[max(0, len(letter.Attempts)-record.KeptAttempts):]
	kept := make([]record.Attempt, len(latest))
	for i, a := range latest {
		a.Topic = record.Clip(a.Topic, maxTopic)
		a.Reason = record.Clip(a.Reason, maxReason)
		kept[i] = a
	}
	return kept
}
