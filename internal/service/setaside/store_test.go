package setaside_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/lab/setasidetest"
	"github.com/outrelay/outrelay/internal/service/setaside"
)

// countOf counts the messages of a handler.
func countOf(ctx context.Context, db *mongo.Database, handler string) (int, error) {
	n, err := db.Collection("inbox_waiting").CountDocuments(ctx, bson.D{{Key: "h", Value: handler}})
	return int(n), err
}

func openStore(t *testing.T, db *mongo.Database) *setaside.Collection {
	t.Helper()
	s := setaside.New(db, "inbox_waiting")
	if err := s.EnsureIndexes(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s
}

func TestCollectionContract(t *testing.T) {
	t.Parallel()

	setasidetest.Run(t, func(t *testing.T) setasidetest.Setup {
		client := stacktest.Client(t)
		db := stacktest.Database(t, client)
		return setasidetest.Setup{
			Store: openStore(t, db),
			Count: func(ctx context.Context, handler string) (int, error) { return countOf(ctx, db, handler) },
			Transaction: func(ctx context.Context, fn func(ctx context.Context) error) error {
				sess, err := client.StartSession()
				if err != nil {
					return err
				}
				defer sess.EndSession(context.WithoutCancel(ctx))
				_, err = sess.WithTransaction(ctx, func(ctx context.Context) (any, error) { return nil, fn(ctx) })
				return err
			},
		}
	})
}

// A majority read may miss a message that was acknowledged before, for example after an election. Then the retries of its queue would
// end, or a later message of its key would overtake it.
func TestAStoredMessageIsNeverMissed(t *testing.T) {
	t.Parallel()
	db := stacktest.Database(t, stacktest.Client(t))
	s := openStore(t, db)
	m := setasidetest.NewMessage("a", 0, 1, 1)
	if err := s.Add(t.Context(), 0, m); err != nil {
		t.Fatal(err)
	}
	doc, err := db.Collection("inbox_waiting").FindOne(t.Context(), bson.D{}).Raw()
	if err != nil {
		t.Fatal(err)
	}

	early := db.Collection("inbox_waiting", options.Collection().SetWriteConcern(&writeconcern.WriteConcern{W: 1}))
	orders := setasidetest.Orders
	for name, read := range map[string]func() (int, error){
		"First": func() (int, error) {
			first, err := s.First(t.Context(), orders, m.Queue)
			if first == nil {
				return 0, err
			}
			return 1, err
		},
		"Heads": func() (int, error) {
			heads, err := s.Heads(t.Context(), []setaside.Place{orders})
			return len(heads), err
		},
		"Waiting": func() (int, error) {
			found, err := s.Waiting(t.Context(), orders, []setaside.Digest{m.Queue})
			return len(found), err
		},
	} {
		for range 20 {
			if _, err := s.Remove(t.Context(), m); err != nil {
				t.Fatal(err)
			}
			if _, err := early.InsertOne(t.Context(), doc); err != nil {
				t.Fatal(err)
			}
			if n, err := read(); n != 1 || err != nil {
				t.Fatalf("%s: got %d (%v), want 1", name, n, err)
			}
		}
	}
}

func TestRetireRemovesTheMessagesOfAHandler(t *testing.T) {
	t.Parallel()
	db := stacktest.Database(t, stacktest.Client(t))
	s := openStore(t, db)
	const messages = 6
	for offset := range int64(messages) {
		if err := s.Add(t.Context(), 0, setasidetest.NewMessage("a", 0, offset, 1)); err != nil {
			t.Fatal(err)
		}
	}
	stranger := setasidetest.NewMessage("a", 1, 1, 1)
	stranger.Handler = "billing/report"
	if err := s.Add(t.Context(), 0, stranger); err != nil {
		t.Fatal(err)
	}

	if n, err := s.Retire(t.Context(), setasidetest.Orders.Handler); n != messages || err != nil {
		t.Errorf("retired messages: got %d (%v), want %d", n, err, messages)
	}
	if n, err := countOf(t.Context(), db, stranger.Handler); n != 1 || err != nil {
		t.Errorf("messages of another handler: got %d (%v), want 1", n, err)
	}
}

// The name of a group may begin with the name of another group, and the name of a handler with the name of another handler.
func TestTheDeskSelectsAGroupAndAHandlerExactly(t *testing.T) {
	t.Parallel()
	db := stacktest.Database(t, stacktest.Client(t))
	s, desk := openStore(t, db), setaside.NewDesk(db, setaside.DefaultCollection)
	for offset, handler := range []string{"g/ship", "g/ship2", "g/eu/ship", "g/eu/pay", "h.g/ship"} {
		m := setasidetest.NewMessage("a", 0, int64(offset), 1)
		m.Handler = handler
		if err := s.Add(t.Context(), 0, m); err != nil {
			t.Fatal(err)
		}
	}

	for query, want := range map[[2]string][]string{
		{"g", ""}:     {"g/ship", "g/ship2"},
		{"g/eu", ""}:  {"g/eu/pay", "g/eu/ship"},
		{"g", "ship"}: {"g/ship"},
		{"", "ship"}:  {"g/eu/ship", "g/ship", "h.g/ship"},
		{"h.g", ""}:   {"h.g/ship"},
	} {
		page, _, err := desk.List(t.Context(), setaside.Query{Group: query[0], Handler: query[1]}, nil, 10)
		var got []string
		for i := range page {
			got = append(got, page[i].Handler)
		}
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("group %q and handler %q: got %q (%v), want %q", query[0], query[1], got, err, want)
		}
	}
}

func TestEveryQueryUsesTheIndex(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	judge := func(p stacktest.Plan) {
		mu.Lock()
		defer mu.Unlock()
		if slices.Contains(p.Stages, "COLLSCAN") {
			t.Errorf("%s scans the collection: %v", p.Command, p.Stages)
		}
		if slices.Contains(p.Stages, "SORT") {
			t.Errorf("%s sorts in memory: %v", p.Command, p.Stages)
		}
		if p.Docs > 1 {
			t.Errorf("%s reads %d documents", p.Command, p.Docs)
		}
	}
	db := stacktest.Database(t, stacktest.Explained(t, judge))
	s := openStore(t, db)
	for offset := range int64(40) {
		if err := s.Add(t.Context(), 0, setasidetest.NewMessage(fmt.Sprint(offset%4), 0, offset, 1)); err != nil {
			t.Fatal(err)
		}
	}

	orders := setasidetest.Orders
	m, err := s.First(t.Context(), orders, setaside.KeyQueue([]byte("1")))
	if err != nil {
		t.Fatal(err)
	}
	steps := map[string]func() error{
		"Postpone": func() error { return s.Postpone(t.Context(), m, time.Second) },
		"Take":     func() error { _, err := s.Take(t.Context(), m); return err },
		"Heads": func() error {
			heads, err := s.Heads(t.Context(), []setaside.Place{{Handler: orders.Handler, Topic: orders.Topic}, orders})
			if len(heads) != 4 {
				t.Errorf("queues: got %d, want 4", len(heads))
			}
			return err
		},
		"Waiting": func() error { _, err := s.Waiting(t.Context(), orders, []setaside.Digest{m.Queue}); return err },
		"Census": func() error {
			_, err := s.Census(t.Context(), setaside.Member{Group: "billing", ID: "a"}, noneUnread)
			return err
		},
		"Requested": func() error { _, err := s.Requested(t.Context(), "billing"); return err },
		"Discarded": func() error {
			_, err := s.Discarded(t.Context(), setaside.Queue{Place: orders, Digest: m.Queue})
			return err
		},
		"CountHandlers": func() error {
			counts, err := setaside.NewDesk(db, setaside.DefaultCollection).CountHandlers(t.Context(), 1000)
			// Another step takes one of the 40 messages.
			if len(counts) != 1 || counts[0].N < 39 || counts[0].Handler != orders.Handler {
				t.Errorf("counts: got %+v, want the messages of %s", counts, orders.Handler)
			}
			return err
		},
		"Stored": func() error { _, err := s.Stored(t.Context(), []setaside.Digest{m.ID}); return err },
	}
	for name, step := range steps {
		if err := step(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// One member counts the messages of the group, from an index. Each other member reads one document, however many messages wait.
func TestMembersReadTheCountsWithOneQuery(t *testing.T) {
	t.Parallel()
	const backlog, members = 500, 20
	var mu sync.Mutex
	var plans []stacktest.Plan
	s := openStore(t, stacktest.Database(t, stacktest.Explained(t, func(p stacktest.Plan) {
		mu.Lock()
		defer mu.Unlock()
		plans = append(plans, p)
	})))
	for offset := range int64(backlog) {
		if err := s.Add(t.Context(), 0, setasidetest.NewMessage(fmt.Sprint(offset%100), 0, offset, 1)); err != nil {
			t.Fatal(err)
		}
	}
	read := func(member string) []stacktest.Plan {
		t.Helper()
		// The first one also records the member.
		for range 2 {
			plans = nil
			c, err := s.Census(t.Context(), setaside.Member{Group: "billing", ID: member}, noneUnread)
			if err != nil || len(c.Counts) != 1 || c.Counts[0].N != backlog {
				t.Fatalf("counts: got %+v (%v), want %d messages of one handler", c.Counts, err, backlog)
			}
		}
		return plans
	}

	for _, p := range read("keeper") {
		if p.Docs > 1 {
			t.Errorf("the keeper reads %d documents: %s", p.Docs, p.Command)
		}
	}
	for i := range members {
		if got := read(fmt.Sprint("member", i)); len(got) != 1 || got[0].Docs > 1 || got[0].Keys > 1 {
			t.Errorf("member %d: got the plans %+v, want one that reads one document", i, got)
		}
	}
}

func noneUnread(context.Context, []setaside.Place) ([]setaside.Place, error) { return nil, nil }

// A member that was killed does not leave.
func TestTheRecordOfAMemberExpires(t *testing.T) {
	t.Parallel()
	db := stacktest.Database(t, stacktest.Client(t))
	s := openStore(t, db)
	counts := db.Collection(setaside.DefaultCollection + setaside.CountsSuffix)
	takeCensus := func(id string) {
		t.Helper()
		member := setaside.Member{Group: "billing", ID: id, Handlers: []string{"by " + id}, Stops: []setaside.Stop{{Handler: "by " + id, Until: time.Now()}}}
		if _, err := s.Census(t.Context(), member, noneUnread); err != nil {
			t.Fatal(err)
		}
	}
	age := func(id string, age time.Duration) {
		t.Helper()
		at := bson.D{{Key: "members." + id + ".at", Value: bson.D{{Key: "$subtract", Value: bson.A{"$$NOW", age.Milliseconds()}}}}}
		if _, err := counts.UpdateOne(t.Context(), bson.D{}, mongo.Pipeline{{{Key: "$set", Value: at}}}); err != nil {
			t.Fatal(err)
		}
	}
	check := func(when string, want ...string) {
		t.Helper()
		names, err := s.Handlers(t.Context(), "billing")
		if err != nil || !slices.Equal(names, want) {
			t.Errorf("handlers %s: got %q (%v), want %q", when, names, err, want)
		}
		notes, err := setaside.NewDesk(db, setaside.DefaultCollection).Groups(t.Context(), "billing")
		if err != nil || len(notes) != 1 || len(notes[0].Stops) != len(want) {
			t.Errorf("groups %s: got %+v (%v), want %d stops", when, notes, err, len(want))
		}
	}

	takeCensus("a")
	takeCensus("b")
	age("b", 25*time.Second)
	check("within the expiry", "by a", "by b")
	takeCensus("b")
	age("a", 31*time.Second)
	check("after the expiry of one", "by b")
	takeCensus("a")
	check("after its return", "by a", "by b")
}

// DistinctResult.Decode of the driver hides the error of the command, so no function of this package may use it.
func TestTheErrorOfTheServerIsReturned(t *testing.T) {
	t.Parallel()
	s := openStore(t, stacktest.Database(t, stacktest.Client(t)))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()

	if _, err := s.Stored(ctx, []setaside.Digest{{1}}); !errors.Is(err, context.Canceled) {
		t.Errorf("Stored: got %v, want %v", err, context.Canceled)
	}
	if _, err := s.Census(ctx, setaside.Member{Group: "billing", ID: "a"}, noneUnread); !errors.Is(err, context.Canceled) {
		t.Errorf("Census: got %v, want %v", err, context.Canceled)
	}
}
