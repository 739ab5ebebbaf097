package lease

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/mongodb"
)

func sampleSenders() []record.Sender {
	return []record.Sender{{
		ID: 4001, Epoch: 3, Generation: 1,
		Open: []record.TopicPartition{{Topic: "t.u", Partition: 2}}, EndOffsets: map[string][]int64{"t.u": {-1, 9}},
	}}
}

func TestN01_EveryAcquisitionIsANewEpochAlsoByTheSameNode(t *testing.T) {
	t.Parallel()
	coll, _ := newCollection(t)

	// In an aggregation pipeline, the name is an expression unless it is a literal.
	l := newLease(t, shortConfig(coll, "$node"))
	var owner, instance string

	for epoch := int64(1); epoch <= 3; epoch++ {
		h := mustAcquire(t, l)
		d := h.Document()
		if d.Epoch != epoch || d.Owner == owner || d.Node != "$node" {
			t.Fatalf("acquisition %d: epoch %d, owner %q after %q", epoch, d.Epoch, d.Owner, owner)
		}
		if epoch == 1 {
			instance = d.Instance
		}
		if d.Instance != instance || instance == "" || d.ReplicaSetID != "here" {
			t.Fatalf("instance %q, replica set %q", d.Instance, d.ReplicaSetID)
		}

		owner = d.Owner
		for range 3 {
			if err := h.Save(t.Context(), Update{}); err != nil {
				t.Fatal(err)
			}
		}

		if got := readStored(t, coll); got.Epoch != epoch || got.Seq <= d.Seq {
			t.Fatalf("epoch %d and seq %d after a renewal, want epoch %d and a seq above %d", got.Epoch, got.Seq, epoch, d.Seq)
		}
		if err := h.Release(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
	}
}

func TestN01_RenewalsLeaveControlAlone(t *testing.T) {
	t.Parallel()
	coll, _ := newCollection(t)
	h := mustAcquire(t, newLease(t, shortConfig(coll, "a")))
	if err := StepDown(t.Context(), coll, slotID, time.Hour); err != nil {
		t.Fatal(err)
	}
	if err := Pin(t.Context(), coll, slotID, "z"); err != nil {
		t.Fatal(err)
	}

	want := readStored(t, coll).Control
	if err := h.Save(t.Context(), Update{Checkpoint: Checkpoint{Position: newPosition(1)}}); err != nil {
		t.Fatal(err)
	}
	if got := readStored(t, coll).Control; !reflect.DeepEqual(got, want) || want.Pin != "z" || want.StepDownNode != "a" {
		t.Errorf("control %+v, want %+v", got, want)
	}
}

func TestN01_OwnSeqAlreadyThereIsSuccess(t *testing.T) {
	t.Parallel()
	coll, app := newCollection(t)
	h := mustAcquire(t, newLease(t, longConfig(coll, "a")))
	before := readStored(t, coll).Seq

	// The write is applied, but its response is an error. The repetition matches nothing and must find its own seq.
	off := failCommand(t, app, bson.D{{Key: "times", Value: 1}}, bson.D{
		{Key: "failCommands", Value: bson.A{"findAndModify"}},
		{Key: "writeConcernError", Value: bson.D{
			{Key: "code", Value: 64},
			{Key: "errmsg", Value: "waiting for replication timed out"},
		}},
	})
	if err := h.acquireTurn(t.Context()); err != nil {
		t.Fatal(err)
	}

	err := h.writeCheckpoint(t.Context(), Checkpoint{Position: newPosition(5)}, nil)
	h.releaseTurn()
	if err != nil {
		t.Fatalf("renewal with a lost response: %v", err)
	}

	d := readStored(t, coll)
	if d.Seq != before+1 || d.Position().Compare(newPosition(5)) != 0 || h.Context().Err() != nil || !h.Valid() {
		t.Errorf("seq %d after %d, position %s", d.Seq, before, d.Token)
	}

	off()
	// A connection that breaks before the write is not a loss either.
	failCommand(t, app, bson.D{{Key: "times", Value: 1}}, bson.D{
		{Key: "failCommands", Value: bson.A{"findAndModify"}}, {Key: "closeConnection", Value: true},
	})
	if err := h.Save(t.Context(), Update{}); err != nil {
		t.Errorf("after a broken connection: %v", err)
	}
}

// A checkpoint that waits for a renewal writes the position at the time of the write, not of the request.
func TestN01_TheCurrentPositionIsAskedForAtTheWrite(t *testing.T) {
	t.Parallel()
	coll, _ := newCollection(t)
	var log bytes.Buffer
	cfg := shortConfig(coll, "a")
	cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
	h := mustAcquire(t, newLease(t, cfg))
	var at atomic.Uint32
	at.Store(3)
	source := func() Checkpoint { return Checkpoint{Position: newPosition(at.Load())} }
	if err := h.acquireTurn(t.Context()); err != nil {
		t.Fatal(err)
	}

	saved := make(chan error)
	go func() { saved <- h.Save(t.Context(), Update{Current: source, ClearPassed: true}) }()
	at.Store(7)

	// This is the write of the renewal.
	if err := h.writeCheckpoint(t.Context(), source(), nil); err != nil {
		t.Fatal(err)
	}

	at.Store(9)
	h.releaseTurn()
	if err := <-saved; err != nil {
		t.Fatal(err)
	}
	if p := readStored(t, coll).Position(); p.Compare(newPosition(9)) != 0 {
		t.Errorf("stored %s", p.Token)
	}
	if strings.Contains(log.String(), "precedes the stored one") {
		t.Error(log.String())
	}
}

func TestN01_ALateWriteAndAnOldPositionChangeNothing(t *testing.T) {
	t.Parallel()
	coll, _ := newCollection(t)
	h := mustAcquire(t, newLease(t, shortConfig(coll, "a")))

	// The second position is before the first.
	for _, n := range []uint32{5, 3} {
		if err := h.Save(t.Context(), Update{Checkpoint: Checkpoint{Position: newPosition(n)}}); err != nil {
			t.Fatal(err)
		}
	}

	if p := readStored(t, coll).Position(); p.Compare(newPosition(5)) != 0 {
		t.Errorf("the position went back to %s", p.Token)
	}

	// A delayed write arrives with a lower seq than the document has.
	h.seq -= 2
	if _, err := h.writeOwnerFields(t.Context(), bson.D{{Key: "token", Value: mongodb.Literal(newPosition(1).Token)}},
		renewing); err == nil {
		t.Error("a delayed write succeeded")
	}
	if p := readStored(t, coll).Position(); p.Compare(newPosition(5)) != 0 {
		t.Errorf("a delayed write moved the position to %s", p.Token)
	}
	if h.Context().Err() != nil {
		t.Error("a delayed write ended the lease")
	}
}

// A renewal reached the server, but its response was lost. A save whose checkpoint was read earlier follows.
func TestN01_AWriteOfUnknownOutcomeIsNotUndone(t *testing.T) {
	t.Parallel()
	coll, _ := newCollection(t)
	h := mustAcquire(t, newLease(t, shortConfig(coll, "a")))

	lost, _ := h.mergeCheckpoint(Checkpoint{Position: newPosition(7)})
	if _, err := h.writeOwnerFields(t.Context(), lost, renewing); err != nil {
		t.Fatal(err)
	}
	if err := h.Save(t.Context(), Update{Checkpoint: Checkpoint{Position: newPosition(5)}}); err != nil {
		t.Fatal(err)
	}
	if p := readStored(t, coll).Position(); p.Compare(newPosition(7)) != 0 {
		t.Errorf("the stored position is %s, want that of the write whose response was lost, %s",
			p.Token, newPosition(7).Token)
	}
}

func TestN01_TheAcquisitionsDocumentIsTheTruth(t *testing.T) {
	t.Parallel()
	coll, _ := newCollection(t)
	h := mustAcquire(t, newLease(t, shortConfig(coll, "a")))
	senders := sampleSenders()
	if err := h.Save(t.Context(), Update{
		Senders: &senders, Offsets: map[string][]int64{"t.u": {1, 2, 3}},
		Checkpoint: Checkpoint{Position: newPosition(9)},
	}); err != nil {
		t.Fatal(err)
	}

	// a does not renew, so its lease expires.
	b := mustAcquire(t, newLease(t, shortConfig(coll, "b")))
	d := b.Document()
	if d.Position().Compare(newPosition(9)) != 0 || len(d.OffsetMap()["t.u"]) != 3 || len(d.Senders()) != 1 {
		t.Errorf("the new owner got %+v", d)
	}
	err := h.Save(t.Context(), Update{Checkpoint: Checkpoint{Position: newPosition(10)}})
	if !errors.Is(err, ErrLeaseLost) {
		t.Errorf("checkpoint of the deposed owner returned %v", err)
	}
	if err := h.Release(t.Context(), func() Checkpoint { return Checkpoint{Position: newPosition(11)} }); !errors.Is(err, ErrLeaseLost) {
		t.Errorf("release of the deposed owner returned %v", err)
	}
	if now := readStored(t, coll); now.Position().Compare(newPosition(9)) != 0 || now.Owner != d.Owner {
		t.Errorf("the deposed owner changed the document: %+v", now)
	}
}

func TestN01_AnAcquisitionWhoseResponseWasLostIsFound(t *testing.T) {
	t.Parallel()
	coll, app := newCollection(t)
	l := newLease(t, longConfig(coll, "a"))
	failCommand(t, app, bson.D{{Key: "times", Value: 1}}, bson.D{
		{Key: "failCommands", Value: bson.A{"findAndModify"}},
		{Key: "writeConcernError", Value: bson.D{
			{Key: "code", Value: 64},
			{Key: "errmsg", Value: "waiting for replication timed out"},
		}},
	})

	h := mustAcquire(t, l)
	if e := h.Document().Epoch; e != 1 {
		t.Errorf("epoch %d: the process waited for its own lease to expire", e)
	}

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := newLease(t, shortConfig(coll, "b")).Acquire(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Acquire of a canceled standby returned %v", err)
	}
}
