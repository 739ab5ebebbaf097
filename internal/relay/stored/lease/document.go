package lease

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/resume"
)

// Document is a watcher document. Only operators write Control. Only the owner writes the other
// fields, except Gap, which commands may add to, and Incidents, from which they may remove.
type Document struct {
	ID         string    `bson:"_id"`
	Owner      string    `bson:"owner,omitempty"` // node and a random value of this acquisition; "" (null) when released
	Epoch      int64     `bson:"epoch"`           // incremented by each acquisition (N1)
	AcquiredAt time.Time `bson:"acquiredAt,omitempty"`
	RenewedAt  time.Time `bson:"renewedAt,omitempty"`
	ExpiresAt  time.Time `bson:"expiresAt"`
	TTLMS      int64     `bson:"ttlMs"` // ttl of the owner, in milliseconds
	Seq        int64     `bson:"seq"`   // incremented by each write of the owner
	Fence      int64     `bson:"fence"` // counts the fenced transactions (N3)

	Process  `bson:",inline"`
	Sessions `bson:",inline"`

	Token        resume.Token   `bson:"token,omitempty"`
	ClusterTime  bson.Timestamp `bson:"clusterTime,omitempty"`
	Collections  []Collection   `bson:"collections,omitempty"`
	PipelineHash string         `bson:"pipelineHash,omitempty"`
	Beside       string         `bson:"beside,omitempty"` // highest position of an envelope that was sent outside of the stream's order (N8)
	Offsets      []TopicOffsets `bson:"offsets,omitempty"`
	SenderTable  SenderTable    `bson:"senders"`
	Instance     string         `bson:"instance"` // a UUID, created with the document (N5)
	ReplicaSetID string         `bson:"replicaSetId,omitempty"`
	Gap          *Gap           `bson:"gap,omitempty"`
	Passed       []Passed       `bson:"passed,omitempty"`    // delivered by other slots before a reslice (N28)
	Swept        *Swept         `bson:"swept,omitempty"`     // by the latest sweep, which is complete
	Incidents    []Incident     `bson:"incidents,omitempty"` // until an operator acknowledges it; at most mostIncidents of each kind
	Stats        bson.Raw       `bson:"stats,omitempty"`
	Control      Control        `bson:"control,omitempty"`
	StartedAt    time.Time      `bson:"startedAt,omitempty"` // first acquisition of the document
}

// Process describes the process of the owner, or of the last one.
type Process struct {
	Node    string `bson:"node,omitempty"`
	Address string `bson:"address,omitempty"`
	Version string `bson:"version,omitempty"`
}

// Sessions are the sessions of transactions on the document, so that they can be ended.
type Sessions struct {
	Session bson.RawValue `bson:"session,omitempty"` // of the owner's transactions
}

// Position returns the checkpoint.
func (d Document) Position() resume.Position {
	return resume.Position{Token: d.Token, ClusterTime: d.ClusterTime}
}

// LowestPosition returns the position that all slots of a watcher have passed. Everything that was committed before it is delivered, waits, or
// is a dead letter. coll is `watchers` of the state database.
func LowestPosition(ctx context.Context, coll *mongo.Collection, watcher string) (bson.Timestamp, error) {
	docs, err := mongodb.FindAll[Document](ctx, mongodb.Majority(coll), "reading watcher "+watcher,
		mongodb.OfSlots(watcher), options.Find().SetProjection(bson.D{{Key: "token", Value: 1}, {Key: "clusterTime", Value: 1}}))
	if err != nil {
		return bson.Timestamp{}, err
	}
	if len(docs) == 0 {
		return bson.Timestamp{}, fmt.Errorf("watcher %s: %w; check the name, or start outrelay run once", watcher, ErrNotFound)
	}

	// A slot that lags decides: its part of a collection is not delivered beyond its position.
	lowest := bson.Timestamp{T: math.MaxUint32, I: math.MaxUint32}
	for _, document := range docs {
		at, ok := document.Position().Time()
		if !ok || at.IsZero() {
			return bson.Timestamp{}, fmt.Errorf("slot %s has no position yet, so the delivered envelopes are unknown; start outrelay run", document.ID)
		}
		if lowest.After(at) {
			lowest = at
		}
	}
	return lowest, nil
}

// CountPartitions returns the largest number of partitions of which a watcher document stores offsets in topic, or 0. An owner forgets the
// offsets of a deleted topic at its takeover. coll is `watchers` of the state database.
func CountPartitions(ctx context.Context, coll *mongo.Collection, topic string) (most int, err error) {
	// The condition on the id selects all documents, by an index.
	ofTopic := bson.D{{Key: "$filter", Value: bson.D{{Key: "input", Value: "$offsets"}, {Key: "cond", Value: op("$eq", "$$this.t", mongodb.Literal(topic))}}}}
	docs, err := mongodb.FindAll[Document](ctx, mongodb.Majority(coll), "reading the offsets of topic "+topic,
		bson.D{{Key: "_id", Value: bson.D{{Key: "$gt", Value: ""}}}, {Key: "offsets.t", Value: topic}}, options.Find().SetProjection(bson.D{{Key: "offsets", Value: ofTopic}}))
	for i := range docs {
		for _, stored := range docs[i].Offsets {
			most = max(most, len(stored.Offsets))
		}
	}
	return most, err
}

// OffsetMap returns the stored offsets by topic, indexed by partition. An entry of −1 means that the
// partition has no stored offset.
func (d Document) OffsetMap() map[string][]int64 { return offsetsByTopic(d.Offsets) }

// Senders returns the producer identities that may still write to Kafka (N4).
func (d Document) Senders() []record.Sender { return d.SenderTable.listSenders() }

// Collection is a collection that the watcher reads. The UUID distinguishes it from a collection that
// was created again with the same name.
type Collection struct {
	NS   string      `bson:"ns"`
	UUID bson.Binary `bson:"uuid"`
	// ReadUpTo is set if the configuration does not name the collection any more: the stream included it up to this cluster time.
	ReadUpTo bson.Timestamp `bson:"readUpTo,omitempty"`
}

// TopicOffsets stores the topic as a value. As the name of a field, a topic with dots would nest (N8).
type TopicOffsets struct {
	Topic   string  `bson:"t"`
	Offsets []int64 `bson:"p"`
}

// Passed records how far an earlier slot had come. The slot had delivered every event of its keys up to
// the position, or stored it as waiting or dead (N28).
type Passed struct {
	Slot string `bson:"slot"` // <i>of<N>
	Pos  string `bson:"pos"`  // as of a waiting envelope (N15)
}

// GapRequested is the reason of a sweep that an operator requested. Its To is zero until an owner
// starts the sweep.
const GapRequested = "operator"

// Gap is a range of the stream that can no longer be read, while it is being swept (N22).
type Gap struct {
	Reason      string         `bson:"reason"`
	From        bson.Timestamp `bson:"from"`
	To          bson.Timestamp `bson:"to"`
	Cursor      bson.Timestamp `bson:"cursor"`
	Redelivered int64          `bson:"redelivered"`
	Repeats     int64          `bson:"repeats"` // of Redelivered, those that may have been sent before the gap
	Since       time.Time      `bson:"since"`
}

// Swept describes the events after a sweep that it may have delivered: those of a transaction that was open at the end of the stretch.
type Swept struct {
	To    bson.Timestamp `bson:"to"`    // an envelope with a later stamp was not swept
	Until bson.Timestamp `bson:"until"` // the sweep cannot have seen a later commit
}

// Incident is something that has happened to events of the slot, as a record for operators. The field that is not nil is its kind.
type Incident struct {
	ID        bson.ObjectID `bson:"id"`
	At        time.Time     `bson:"at"`
	Lost      *LostHistory  `bson:"lost,omitempty"`
	Discarded *Discarded    `bson:"discarded,omitempty"`
}

// Discarded counts the events that are not sent because their collection was dropped. Events waited or were claimed, and the owner has removed
// them.
type Discarded struct {
	NS        string `bson:"ns"` // the collection, or the database if all of it was dropped
	Events    int64  `bson:"events"`
	Scheduled int64  `bson:"scheduled"` // further ones, which were in the collection at the last count before the drop
}

// LostHistory is a gap that was swept.
type LostHistory struct {
	Reason  string         `bson:"reason"`
	From    bson.Timestamp `bson:"from"` // zero if nothing of the history was known
	To      bson.Timestamp `bson:"to"`
	Swept   int64          `bson:"swept"`
	Repeats int64          `bson:"repeats"` // as of [Gap]
}

// mostIncidents bounds the incidents of one kind in a document. The newest are kept.
const mostIncidents = 20

// SweepStart returns where a requested sweep from the time ordered must start. No undelivered event may
// be left out, so the sweep starts no later than the checkpoint, and no later than an unfinished sweep.
func (d Document) SweepStart(ordered bson.Timestamp) bson.Timestamp {
	from := ordered
	if !d.ClusterTime.IsZero() && d.ClusterTime.Before(from) {
		from = d.ClusterTime
	}

	if d.Gap != nil && d.Gap.From.Before(from) {
		from = d.Gap.From
	}
	return from
}

func offsetsByTopic(list []TopicOffsets) map[string][]int64 {
	byTopic := make(map[string][]int64, len(list))
	for _, t := range list {
		byTopic[t.Topic] = slices.Clone(t.Offsets)
	}
	return byTopic
}

// sortedOffsets returns the offsets as a list sorted by topic. The order makes an unchanged map an
// unchanged field, which costs nothing in the oplog.
func sortedOffsets(byTopic map[string][]int64) []TopicOffsets {
	out := make([]TopicOffsets, 0, len(byTopic))
	for _, t := range slices.Sorted(maps.Keys(byTopic)) {
		out = append(out, TopicOffsets{Topic: t, Offsets: byTopic[t]})
	}
	return out
}

// mergeOffsets returns held with the offsets of next. Where next has an offset below 0, or lacks the
// partition, the offset in held stays: the snapshot may have been taken just before a partition was
// opened (N9). The arguments are not changed.
func mergeOffsets(held, next map[string][]int64) map[string][]int64 {
	out := maps.Clone(held)
	if out == nil {
		out = make(map[string][]int64, len(next))
	}

	for topic, offsets := range next {
		merged := slices.Clone(offsets)
		old := out[topic]
		for p := range old {
			if p >= len(merged) {
				merged = append(merged, old[p])
			} else if merged[p] < 0 {
				merged[p] = old[p]
			}
		}
		out[topic] = merged
	}
	return out
}
