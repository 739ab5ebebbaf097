package lease

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// The model of a lease: some order of the server's responses that fits their times must be valid. The server's
// clock decides about expiry, so the times in the responses are part of the history.
type leaseState struct {
	epoch   int64
	held    bool
	expires time.Time
}

type leaseOp struct {
	kind  string // acquire, renew, release
	epoch int64  // of the caller; 0 for acquire
}

type leaseResult struct {
	won         bool
	lost        bool
	epoch       int64
	at, expires time.Time // of the server
}

var leaseModel = porcupine.Model{
	Init: func() any { return leaseState{} },
	Step: func(state, input, output any) (bool, any) {
		s, in, out := state.(leaseState), input.(leaseOp), output.(leaseResult)
		if in.kind == "acquire" {
			if !out.won {
				return s.held && out.epoch == s.epoch, s // this owner holds it, so the attempt fails
			}
			legal := out.epoch == s.epoch+1 && (!s.held || !out.at.Before(s.expires))
			return legal, leaseState{out.epoch, true, out.expires}
		}
		if mine := s.held && s.epoch == in.epoch; out.lost || !mine {
			return out.lost && !mine, s
		}

		return true, leaseState{in.epoch, in.kind == "renew", out.expires}
	},
	DescribeOperation: func(input, output any) string { return fmt.Sprintf("%+v → %+v", input, output) },
}

type history struct {
	mu     sync.Mutex
	start  time.Time
	epochs atomic.Int64 // number of acquired epochs
	ops    []porcupine.Operation
	valid  map[int64][2]time.Duration // by epoch: first and last time at which its holder was valid
}

func (h *history) recordOperation(client int, in leaseOp, do func() (leaseResult, bool)) (leaseResult, bool) {
	called := time.Since(h.start)
	out, known := do()
	if known {
		op := porcupine.Operation{
			ClientId: client, Input: in, Call: int64(called), Output: out,
			Return: int64(time.Since(h.start)),
		}
		h.mu.Lock()
		h.ops = append(h.ops, op)
		h.mu.Unlock()
	}
	return out, known
}

// recordEpoch records that the holder of epoch was valid. It reads the clock before it calls Valid: a lease that
// is valid now was valid then too, so the recorded time cannot hide an overlap.
func (h *history) recordEpoch(epoch int64, held *Held) bool {
	at := time.Since(h.start)
	if !held.Valid() {
		return false
	}

	h.mu.Lock()
	defer h.mu.Unlock()
	span, known := h.valid[epoch]
	if !known {
		span[0] = at
	}

	span[1] = at
	h.valid[epoch] = span
	return true
}

func (h *history) acquireOnce(t *testing.T, client int, c *contender) *Held {
	var held *Held
	h.recordOperation(client, leaseOp{kind: "acquire"}, func() (leaseResult, bool) {
		owner := ownerName(c.lease.cfg.Node)
		sent := c.lease.clock()
		var doc Document
		err := c.lease.coll.FindOneAndUpdate(t.Context(), bson.D{{Key: "_id", Value: slotID}}, c.acquirePipeline(owner),
			options.FindOneAndUpdate().SetUpsert(true).SetReturnDocument(options.After)).Decode(&doc)
		// Another client has created the document at the same time.
		if mongo.IsDuplicateKeyError(err) {
			return leaseResult{}, false
		}
		if err != nil {
			t.Error(err)
			return leaseResult{}, false
		}
		if doc.Owner == owner {
			h.epochs.Add(1)
			held = newHeld(t.Context(), c, doc, sent)
		}

		return leaseResult{won: held != nil, epoch: doc.Epoch, at: doc.AcquiredAt, expires: doc.ExpiresAt}, true
	})
	return held
}

func (h *history) writeOnce(t *testing.T, client int, held *Held, release bool) bool {
	kind := "renew"
	if release {
		kind = "release"
	}

	out, _ := h.recordOperation(client, leaseOp{kind: kind, epoch: held.acquired.Epoch}, func() (leaseResult, bool) {
		v, err := held.writeOwnerFields(t.Context(), nil, purpose(release))
		if held.ctx.Err() != nil {
			return leaseResult{lost: true}, true
		}
		if err != nil {
			t.Error(err)
			return leaseResult{}, false
		}

		expires := v.RenewedAt.Add(held.lease.cfg.TTL)
		if release {
			expires = v.RenewedAt
		}

		return leaseResult{epoch: v.Epoch, at: v.RenewedAt, expires: expires}, true
	})

	return !out.lost
}

// pauseRandomly simulates a process that does not run for 0 to 2 ttl, mostly for a short time.
func pauseRandomly(r *rand.Rand, ttl time.Duration) {
	d := time.Duration(r.Int64N(int64(ttl / 4)))
	if r.IntN(8) == 0 {
		d = time.Duration(r.Int64N(int64(2 * ttl)))
	}
	<-time.After(d)
}

func (h *history) contendUntil(t *testing.T, client int, coll *mongo.Collection, enough func() bool) {
	cfg := shortConfig(coll, fmt.Sprintf("node%d", client))
	cfg.TTL, cfg.Renew = 150*time.Millisecond, 30*time.Millisecond
	l := New(cfg)

	r := rand.New(rand.NewPCG(uint64(client), 1))
	c, err := l.newContender()
	if err != nil {
		t.Error(err)
		return
	}
	defer c.endSession()

	for !enough() {
		held := h.acquireOnce(t, client, c)
		for held != nil {
			// A stalled process calls Valid before it works. It is suspended then, but it still renews.
			for range 3 {
				if h.recordEpoch(held.acquired.Epoch, held) {
					pauseRandomly(r, cfg.TTL)
				}
			}

			h.recordEpoch(held.acquired.Epoch, held)
			end := r.IntN(5)
			if end == 0 {
				// A killed owner releases nothing.
				break
			}
			if !h.writeOnce(t, client, held, end == 1) || end == 1 {
				break
			}
		}
		pauseRandomly(r, cfg.TTL/2)
	}
}

func TestN01_EightContendersWithStallsAreLinearizable(t *testing.T) {
	t.Parallel()
	coll, _ := newCollection(t)
	stream, err := coll.Watch(t.Context(), mongo.Pipeline{}, options.ChangeStream().SetMaxAwaitTime(100*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = stream.Close(context.WithoutCancel(t.Context())) }()

	h := &history{start: time.Now(), valid: make(map[int64][2]time.Duration)}
	// A slow server gets time for this number of epochs.
	const least = 10
	enough := func() bool {
		d := time.Since(h.start)
		return d > patient || d > 3*time.Second && h.epochs.Load() >= least
	}

	var wg sync.WaitGroup
	for client := range 8 {
		wg.Go(func() { h.contendUntil(t, client, coll, enough) })
	}

	wg.Wait()

	if verdict := porcupine.CheckOperationsTimeout(leaseModel, h.ops, 2*time.Minute); verdict != porcupine.Ok {
		t.Errorf("the history of %d operations is %s, want a linearizable one", len(h.ops), verdict)
	}
	last := readStored(t, coll)
	if last.Epoch < least {
		t.Errorf("%d epochs in %d operations, want more", last.Epoch, len(h.ops))
	}

	for e := int64(1); e < last.Epoch; e++ {
		if a, b := h.valid[e], h.valid[e+1]; b[0] != 0 && a[1] >= b[0] {
			t.Errorf("epoch %d was valid at %v, but epoch %d had been valid since %v", e, a[1], e+1, b[0])
		}
	}

	t.Logf("%d operations, %d epochs", len(h.ops), last.Epoch)
	checkWrites(t, stream, last)
}

// checkWrites reads the writes of the document from its change stream. Epochs increase by one, an owner has one
// epoch, a lease is acquired only after its release or expiry, and seq never goes back.
func checkWrites(t *testing.T, stream *mongo.ChangeStream, last Document) {
	t.Helper()
	var now leaseState
	owners := make(map[string]int64)
	var owner string
	var seq int64
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()

	for events := 0; seq < last.Seq || now.epoch < last.Epoch || owner != last.Owner; events++ {
		if !stream.Next(ctx) {
			t.Fatalf("the history ends after %d events: %v", events, stream.Err())
		}
		var ev struct {
			Full   bson.Raw `bson:"fullDocument"`
			Update struct {
				Fields bson.Raw `bson:"updatedFields"`
			} `bson:"updateDescription"`
		}
		if err := stream.Decode(&ev); err != nil {
			t.Fatal(err)
		}

		fields := ev.Update.Fields
		if fields == nil {
			fields = ev.Full
		}
		if v, err := fields.LookupErr("epoch"); err == nil {
			taken := fields.Lookup("acquiredAt").Time()
			if epoch := v.AsInt64(); epoch != now.epoch+1 || now.held && taken.Before(now.expires) {
				t.Errorf("epoch %d at %v after %+v", epoch, taken, now)
			}
			now.epoch, now.held = v.AsInt64(), true
		}
		if v, err := fields.LookupErr("owner"); err == nil {
			owner, _ = v.StringValueOK()
			if now.held = owner != ""; now.held {
				if e, seen := owners[owner]; seen {
					t.Errorf("owner %s has epochs %d and %d, want one", owner, e, now.epoch)
				}
				owners[owner] = now.epoch
			}
		}
		if v, err := fields.LookupErr("expiresAt"); err == nil {
			now.expires = v.Time()
		}
		if v, err := fields.LookupErr("seq"); err == nil {
			if v.AsInt64() < seq {
				t.Errorf("seq went back from %d to %d", seq, v.AsInt64())
			}
			seq = v.AsInt64()
		}
	}
}
