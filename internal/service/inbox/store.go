package inbox

import (
	"context"
	"time"
)

// NextHolder is the holder of a message after it was marked as handled.
type NextHolder bool

// The holder keeps the message, or loses it and cannot finish any more.
const (
	KeepHolder   NextHolder = false
	RemoveHolder NextHolder = true
)

// Store contains the state of an inbox: markers of handled messages, leases of claims, and watermarks.
// The Inbox decides, the Store reads and writes. Package mongostore and internal/lab/memory implement it.
//
// Each method is one atomic operation. If ctx has a transaction, the operation is part of it, and an
// error of the transaction (for example a write conflict) is returned. All times refer to the clock of
// the Store.
type Store interface {
	// Transaction runs fn in the transaction of ctx, or in a new one, in the same way as
	// outbox.Box.Transaction.
	Transaction(ctx context.Context, fn func(ctx context.Context) error) error

	// CurrentTransaction returns a comparable value for the running transaction of ctx, or nil if there
	// is none.
	CurrentTransaction(ctx context.Context) any

	// Outside returns ctx without its transaction.
	Outside(ctx context.Context) context.Context

	// Now returns the time of this process, for durations. Wait blocks for d in this time, and returns
	// an error if ctx ends before.
	Now() time.Time
	Wait(ctx context.Context, d time.Duration) error

	// ReadMarks returns the stored watermarks of the lanes.
	ReadMarks(ctx context.Context, lanes []LaneKey) (Marks, error)

	// AdvanceMarks replaces each watermark by the result of Mark.Advance.
	AdvanceMarks(ctx context.Context, moves []Move) error

	// WriteGeneration writes the watermark of a partition if it is still seen, or if it still does not
	// exist and seen is nil. ok reports whether it did.
	WriteGeneration(ctx context.Context, p Partition, seen *Mark, next Mark) (ok bool, err error)

	// WriteTopicIDs writes the ids into the watermarks of TopicLane.
	WriteTopicIDs(ctx context.Context, ids map[Partition]string) error

	// ReadMarkers returns the stored markers with these ids.
	ReadMarkers(ctx context.Context, ids []ID) (map[ID]Marker, error)

	// InsertMarkers inserts markers of handled messages. It returns ErrMarked if one of them exists; the transaction
	// then cannot commit.
	InsertMarkers(ctx context.Context, list []NewMarker) error

	// ClaimMarker writes a claim into the marker and counts an attempt, unless the message was handled
	// or the marker has the same or a later epoch. It returns the resulting marker.
	ClaimMarker(ctx context.Context, m NewMarker, h Holder) (Marker, error)

	// MarkHandled marks a claimed message as handled, if h is still the holder. ok reports whether h was the holder.
	MarkHandled(ctx context.Context, id ID, h Holder, next NextHolder) (ok bool, err error)

	// WriteResponse stores the response in an existing marker. ReadResponse returns it, or nil if there is no marker or no response.
	WriteResponse(ctx context.Context, id ID, r Response) error
	ReadResponse(ctx context.Context, id ID) (*Response, error)

	// ReadLeases returns the stored leases with these ids.
	ReadLeases(ctx context.Context, ids []ID) (map[ID]Lease, error)

	// AcquireLease acquires the lease for the owner if it has expired, with a higher epoch. It returns
	// the resulting lease.
	AcquireLease(ctx context.Context, id ID, owner string, d time.Duration) (Lease, error)

	// RaiseEpoch, RenewLease and ReleaseLease change the lease if the owner still holds it. ok reports
	// whether it does. After ReleaseLease others can acquire the lease after d.
	RaiseEpoch(ctx context.Context, id ID, h Holder) (ok bool, err error)
	RenewLease(ctx context.Context, id ID, owner string, d time.Duration) (ok bool, err error)
	ReleaseLease(ctx context.Context, id ID, owner string, d time.Duration) error

	// DeleteLease deletes the lease if the owner still holds it.
	DeleteLease(ctx context.Context, id ID, owner string) error

	// EnsureIndexes creates the missing collections and indexes.
	EnsureIndexes(ctx context.Context) error

	// Sweep deletes at most limit expired markers, the oldest first, and returns their number.
	Sweep(ctx context.Context, limit int) (removed int64, err error)

	// Counts returns the sizes of the inbox.
	Counts(ctx context.Context) (Counts, error)

	// AddPartition adds a partition to the tenure of this process and returns the id of the tenure, or
	// "" if the Store has no tenures. RemovePartitions removes partitions from it. A tenure identifies
	// the transactions of a process, so that the next owner of a partition can end them.
	AddPartition(p Partition) (tenure string)
	RemovePartitions(ctx context.Context, list []Partition) error

	// RecordTransaction stores that the transaction of ctx belongs to the tenure of this process.
	RecordTransaction(ctx context.Context)

	// Heartbeat stores that this process lives: see Inbox.Heartbeat.
	Heartbeat(ctx context.Context) error

	// EndTransactions ends the open transactions of another tenure, at once or in a later Heartbeat, if
	// its process is silent for MaxSilence.
	EndTransactions(ctx context.Context, tenure string) error
}

// ID is the identity of a marker and of its lease. It is comparable.
type ID struct {
	Key

	// Generation is the generation of the partition, if the id of the message is its place.
	Generation int64
}

// NewMarker is a marker to be written.
type NewMarker struct {
	ID    ID
	Place Place
}

// States of a marker.
const (
	StateHandled = "handled"
	StateClaimed = "claimed"
)

// Holder identifies a claim.
type Holder struct {
	Owner string `bson:"o"`
	Epoch int64  `bson:"e"`
}

// Marker contains the fields of a stored marker that decisions need.
type Marker struct {
	State    string `bson:"s"`
	Holder   `bson:",inline"`
	Attempts int `bson:"a"` // number of claims
}

// Lease is a stored lease.
type Lease struct {
	Holder `bson:",inline"`
	Until  time.Time `bson:"until"`
	Live   bool      `bson:"live"` // by the clock of the Store; only ReadLeases sets it
}

// Partition identifies a partition for a consumer.
type Partition struct {
	Consumer, Topic string
	Number          int32
}

// LaneKey identifies a lane of a partition for a consumer.
type LaneKey struct {
	Partition
	Lane int32
}

// Lanes that are none of a record.
const (
	// PartitionLane is the lane of the watermark that belongs to a whole partition.
	PartitionLane = -1

	// TopicLane is the lane of the id of the topic that a group reads. Its watermark has only that id, and the name of the group
	// in place of a consumer. The ids in PartitionLane are those of its handlers, and may be those of an earlier topic.
	TopicLane = -2
)

// Mark is a stored watermark.
type Mark struct {
	Generation int64 `bson:"g"`
	Next       int64 `bson:"n"` // the offset after the last handled record
	Epoch      int32 `bson:"e"` // leader epoch of that record, or −1 if unknown; in PartitionLane, that of the leader at the last Attach

	By string `bson:"by"` // the tenure that attached last; only in PartitionLane
	ID string `bson:"id"` // id of the topic, or "" if unknown; only in PartitionLane (of this generation) and TopicLane
}

// Move advances the watermark of a lane to Mark.
type Move struct {
	LaneKey
	Mark
}

// Counts contains the sizes of the inbox.
type Counts struct {
	// Markers is the number of handled and claimed messages. It may be inaccurate after a crash of the
	// server.
	Markers int64

	// Claimed is the number of claims, including expired ones.
	Claimed int64

	// Expired is the number of claims whose lease has expired.
	Expired int64
}
