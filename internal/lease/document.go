package lease

import (
	"maps"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/resume"
)

// Document is a watcher document. Control is written by operators only, everything else by the owner only.
type Document struct {
	ID         string    `bson:"_id"`
	Owner      string    `bson:"owner"` // node and a random value of this acquisition; "" (null) when released
	Node       string    `bson:"node"`  // of the owner, or of the last one
	Epoch      int64     `bson:"epoch"` // grows by one with each acquisition (N1)
	AcquiredAt time.Time `bson:"acquiredAt"`
	RenewedAt  time.Time `bson:"renewedAt"`
	ExpiresAt  time.Time `bson:"expiresAt"`
	Seq        int64     `bson:"seq"`   // grows with each write of the owner
	Fence      int64     `bson:"fence"` // counts the fenced transactions (N3)

	Token        resume.Token   `bson:"token,omitempty"`
	ClusterTime  bson.Timestamp `bson:"clusterTime,omitempty"`
	Collections  []Collection   `bson:"collections,omitempty"`
	PipelineHash string         `bson:"pipelineHash,omitempty"`
	Dirty        []string       `bson:"dirty,omitempty"` // namespaces with exceptions or scheduled envelopes (N17)
	Offsets      []TopicOffsets `bson:"offsets,omitempty"`
	SenderList   []SenderEntry  `bson:"senders,omitempty"`
	Generation   int            `bson:"generation"` // of the transactional id
	Instance     string         `bson:"instance"`   // a UUID, made with the document (N5)
	ReplicaSetID string         `bson:"replicaSetId,omitempty"`
	Gap          *Gap           `bson:"gap,omitempty"`
	Passed       []Passed       `bson:"passed,omitempty"` // what other slots had delivered when the watcher was divided anew (N28)
	Stats        bson.Raw       `bson:"stats,omitempty"`
	Session      bson.RawValue  `bson:"session,omitempty"` // of the owner's fenced transactions, so that they can be ended
	Foreign      []bson.Raw     `bson:"foreign,omitempty"` // sessions of transactions that others begin over the document
	Control      Control        `bson:"control,omitempty"`
	Address      string         `bson:"address,omitempty"`
	Version      string         `bson:"version,omitempty"`
	StartedAt    time.Time      `bson:"startedAt,omitempty"` // first acquisition of the document
}

// Position is the checkpoint.
func (d Document) Position() resume.Position {
	return resume.Position{Token: d.Token, ClusterTime: d.ClusterTime}
}

// OffsetMap is the stored offsets by topic, indexed by partition; −1 is none.
func (d Document) OffsetMap() map[string][]int64 { return offsetsByTopic(d.Offsets) }

// Senders are the producer identities that may still write (N4).
func (d Document) Senders() []record.Sender {
	out := make([]record.Sender, len(d.SenderList))
	for i, s := range d.SenderList {
		out[i] = record.Sender{ID: s.ID, Epoch: s.Epoch, Generation: s.Generation}
		for _, tp := range s.Open {
			out[i].Open = append(out[i].Open, record.TopicPartition{Topic: tp.Topic, Partition: tp.Partition})
		}
		if len(s.Until) > 0 {
			out[i].Until = offsetsByTopic(s.Until)
		}
	}
	return out
}

// Collection is a collection that the watcher reads, with the identity that tells a re-created one apart.
type Collection struct {
	NS   string      `bson:"ns"`
	UUID bson.Binary `bson:"uuid"`
}

// TopicOffsets is stored with the topic as a value: as a field's name a dotted topic would nest (N8).
type TopicOffsets struct {
	Topic   string  `bson:"t"`
	Offsets []int64 `bson:"p"`
}

// SenderEntry is a record.Sender as stored.
type SenderEntry struct {
	ID         int64            `bson:"id"`
	Epoch      int16            `bson:"epoch"`
	Generation int              `bson:"generation"`
	Open       []TopicPartition `bson:"open"`
	Until      []TopicOffsets   `bson:"until,omitempty"`
}

// TopicPartition is a record.TopicPartition as stored.
type TopicPartition struct {
	Topic     string `bson:"t"`
	Partition int32  `bson:"p"`
}

// Passed says that what the stream brings of a part of the keys up to a position was delivered, or written down, by the slot
// that had the part before (N28).
type Passed struct {
	Part string `bson:"part"` // <i>of<N>
	Pos  string `bson:"pos"`  // as of an exception (N15)
}

// GapOrdered is the reason of a gap that an operator asked to be swept; its To is zero until an owner begins.
const GapOrdered = "operator"

// Gap is a stretch of the stream that can no longer be read, while it is being swept (N22).
type Gap struct {
	Reason      string         `bson:"reason"`
	From        bson.Timestamp `bson:"from"`
	To          bson.Timestamp `bson:"to"`
	Cursor      bson.Timestamp `bson:"cursor"`
	Redelivered int64          `bson:"redelivered"`
	Since       time.Time      `bson:"since"`
}

// SweepFrom is where a sweep of the document begins that is ordered from a time on: nothing that is not delivered may be left
// out, so it is the position if that is earlier, and the beginning of a stretch that is half swept.
func (d Document) SweepFrom(ordered bson.Timestamp) bson.Timestamp {
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
	m := make(map[string][]int64, len(list))
	for _, t := range list {
		m[t.Topic] = slices.Clone(t.Offsets)
	}
	return m
}

// sortedOffsets lists the topics in order, so that an unchanged map is an unchanged field and costs nothing in the oplog.
func sortedOffsets(m map[string][]int64) []TopicOffsets {
	out := make([]TopicOffsets, 0, len(m))
	for _, t := range slices.Sorted(maps.Keys(m)) {
		out = append(out, TopicOffsets{Topic: t, Offsets: m[t]})
	}
	return out
}

func senderEntries(list []record.Sender) []SenderEntry {
	out := make([]SenderEntry, len(list))
	for i, s := range list {
		e := SenderEntry{ID: s.ID, Epoch: s.Epoch, Generation: s.Generation, Open: make([]TopicPartition, 0, len(s.Open))}
		for _, tp := range s.Open {
			e.Open = append(e.Open, TopicPartition{Topic: tp.Topic, Partition: tp.Partition})
		}
		if len(s.Until) > 0 {
			e.Until = sortedOffsets(s.Until)
		}
		out[i] = e
	}
	return out
}

// mergeOffsets lays next over held: an entry below 0 and a partition that next does not know keep what is held, because
// the snapshot may have been taken just before a partition was adopted (N9). Neither argument is changed.
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
