package model

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find)) }

// twin is the ledger of the model and the real one, on MongoDB, with the same outcomes.
type twin struct {
	t       *testing.T
	world   *world
	book    *book
	ledger  *ledger.Ledger
	store   *waiting.Store
	letters *mongo.Collection
}

func newTwin(t *testing.T) *twin {
	t.Helper()
	client := stacktest.Client(t)
	own := state.Of(stacktest.Database(t, client))
	held, err := lease.New(lease.Config{Collection: own.Collection("watchers"), ID: "orders/0of1", Node: "a", TTL: time.Hour, ReplicaSetID: "here"}).Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	w := newWorld(nothing)
	w.rand = rand.New(rand.NewPCG(1, 1))
	term := w.newTerm()
	x := &twin{t: t, world: w, book: term.ledger, store: waiting.NewStore(own.Collection("waiting"), watcher, slot.Range{}), letters: mongodb.Majority(own.Collection("letters"))}
	x.ledger = ledger.New(ledger.Config{
		Fencer: held, Store: x.store, Letters: own.Collection("letters"), Claims: own.Collection(waiting.ClaimsName),
		Source:      letters.Source{Kind: "relay", Watcher: watcher, Node: "a", Epoch: 1},
		MaxAttempts: maxAttempts, Backoff: retry.Policy{Base: time.Second, Cap: time.Second}, Recording: ledger.RecordPosition,
		Restore: func(context.Context, []*ledger.Outcome) error { return nil },
		Entered: func([]*waiting.Entry) {}, Now: time.Now,
		OnRetry: func(err error) { t.Error(err) }, OnRecovered: func() {}, Count: func(*ledger.Outcome) {}, Log: slog.New(slog.DiscardHandler),
	})
	return x
}

// storeBoth stores outcomes that make returns, one list for each ledger.
func (x *twin) storeBoth(build func() []*ledger.Outcome) {
	x.t.Helper()
	if err := x.ledger.Store(x.t.Context(), build()); err != nil {
		x.t.Fatal(err)
	}
	if err := x.book.Store(x.t.Context(), build()); err != nil {
		x.t.Fatal(err)
	}
}

// compare fails the test unless both have the same waiting envelopes, in one order, and the same letters.
func (x *twin) compare(when string) {
	x.t.Helper()
	describe := func(d *waiting.Document) string {
		return fmt.Sprintf("%x %s %s %s %v %s %s %d %d", d.DocumentID, d.NS, d.Key, d.Pos, d.Pending, d.Reason, d.Origin, d.Attempts, d.Uncounted)
	}
	var actual, modeled []string
	for list, read := range map[*[]string]func(context.Context, *waiting.Scan, int, func(bson.Raw) error) (bool, error){
		&actual: x.store.ReadPage, &modeled: (&storeReader{x.world}).ReadPage,
	} {
		_, err := read(x.t.Context(), &waiting.Scan{}, 10_000, func(raw bson.Raw) error {
			document := waiting.ReadDocument(raw)
			*list = append(*list, describe(&document))
			return nil
		})
		if err != nil {
			x.t.Fatal(err)
		}
	}
	if !slices.Equal(actual, modeled) {
		x.t.Errorf("%s, MongoDB has\n%v\nand the model\n%v", when, actual, modeled)
	}

	var dead []string
	err := letters.Each(x.t.Context(), x.letters, watcher, func(mark letters.Mark) error {
		dead = append(dead, describeLetter(mark))
		return nil
	})
	if err != nil {
		x.t.Fatal(err)
	}
	var expected []string
	for l := range maps.Values(x.world.letters) {
		expected = append(expected, describeLetter(l.mark))
	}
	slices.Sort(dead)
	slices.Sort(expected)
	if !slices.Equal(dead, expected) {
		x.t.Errorf("%s, MongoDB has the letters\n%v\nand the model\n%v", when, dead, expected)
	}
	x.t.Logf("%s: %d wait, %d are dead", when, len(actual), len(dead))
}

func describeLetter(mark letters.Mark) string {
	return fmt.Sprintf("%s %s %s %q", mark.NS, mark.ID, mark.Pos, mark.Topic)
}

// The ledger of the model stores the same documents as the real one, and its store returns it in the same order: outcomes of the stream, and then of sends
// with random results.
func TestTheModelStoresWhatTheLedgerStores(t *testing.T) {
	t.Parallel()
	x := newTwin(t)
	for len(x.world.stream) < 60 {
		x.world.commitEvents()
	}
	random := rand.New(rand.NewPCG(5, 5))

	var kinds []int
	for range x.world.stream {
		kinds = append(kinds, random.IntN(4))
	}
	x.storeBoth(func() (list []*ledger.Outcome) {
		for i, s := range x.world.stream {
			s.unstorable = false
			o := &ledger.Outcome{NS: s.ns, Raw: s.raw, Pos: s.pos, Key: s.key, Partition: record.AnyPartition}
			switch kinds[i] {
			case 0:
				o.End, o.Reason, o.Topics = ledger.Waiting, waiting.Parked, s.topics
			case 1:
				o.End, o.Reason, o.Topics = ledger.Waiting, waiting.Blocked, s.topics[:1]
			case 2:
				o.End, o.Reason, o.Topics, o.Topic = ledger.Retrying, waiting.Retry, s.topics[:1], s.topics[0]
				o.Rejection = record.Rejection{Class: record.RecordRejected, Reason: "not now"}
			default:
				o.End, o.Topic, o.Rejection = ledger.Dead, s.topics[0], record.Rejection{Class: record.MessageTooLarge, Reason: "too large"}
			}
			list = append(list, o)
		}
		return list
	})
	x.compare("after the stream")

	for round := range 4 {
		documents := slices.Collect(maps.Values(x.world.store))
		slices.SortFunc(documents, func(a, b *stored) int { return slices.Compare(a.DocumentID[:], b.DocumentID[:]) })
		seed := random.Uint64()
		x.storeBoth(func() (list []*ledger.Outcome) {
			dice := rand.New(rand.NewPCG(seed, 1))
			for _, d := range documents {
				document := d.Document
				document.Envelope = nil
				var results []record.Result
				for _, topic := range document.Pending {
					result := record.Result{Topic: topic, Offset: 7}
					switch dice.IntN(4) {
					case 0:
						result.Rejection = &record.Rejection{Class: record.RecordRejected, Reason: "not now"}
					case 1:
						result.Held = record.ErrPartitionParked
					}
					results = append(results, result)
				}
				list = append(list, x.ledger.Decide(&document, document.Pending, results))
			}
			return list
		})
		x.compare(fmt.Sprint("after round ", round))
	}
}
