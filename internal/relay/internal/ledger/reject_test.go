package ledger

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// An envelope that MongoDB rejects becomes a dead letter with all of it. The envelopes that are stored with it wait as usual.
func TestN16_ARejectedEnvelopeIsIsolated(t *testing.T) {
	t.Parallel()
	const all, odd = 40, 17
	index := func(b *bench, unique bool, fields ...string) {
		b.t.Helper()
		spec := bson.D{{Key: "key", Value: mongodb.Ascending(fields...)}, {Key: "name", Value: "own"}, {Key: "unique", Value: unique}}
		if unique {
			spec = append(spec, bson.E{Key: "partialFilterExpression", Value: bson.D{{Key: fields[0], Value: bson.D{{Key: "$exists", Value: true}}}}})
		}
		if err := b.db.RunCommand(b.t.Context(), bson.D{{Key: "createIndexes", Value: b.waiting.Name()}, {Key: "indexes", Value: bson.A{spec}}}).Err(); err != nil {
			b.t.Fatal(err)
		}
	}

	for name, c := range map[string]struct {
		prepare func(b *bench)
		field   bson.E // of the rejected envelope
		code    string // in the reason of its letter
	}{
		"by a validator": {
			prepare: func(b *bench) { b.validate(b.waiting, without("envelope.payload", "poison")) },
			field:   bson.E{Key: "payload", Value: "poison"}, code: "failed validation",
		},
		"by a unique index": {
			prepare: func(b *bench) {
				index(b, true, "envelope.order")
				b.enter(1000, func(e *waiting.Entry) { e.Raw = b.newEnvelope(1000, bson.E{Key: "order", Value: "o"}).Raw })
			},
			field: bson.E{Key: "order", Value: "o"}, code: "E11000",
		},
		"by an index of two arrays": {
			prepare: func(b *bench) { index(b, false, "envelope.payload.a", "envelope.payload.b") },
			field:   bson.E{Key: "payload", Value: bson.D{{Key: "a", Value: bson.A{1}}, {Key: "b", Value: bson.A{2}}}}, code: "parallel arrays",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setUp(t)
			c.prepare(b)
			var list []*Outcome
			for i := range all {
				if i == odd {
					list = append(list, b.newEnvelope(i, c.field))
					continue
				}
				list = append(list, b.newEnvelope(i))
			}

			for i, o := range b.store(list...) {
				if o != list[i] {
					t.Fatalf("outcome %d is reported out of order", i)
				}
				if want := map[bool]End{true: Dead, false: Waiting}[i == odd]; o.End != want {
					t.Errorf("outcome %d: %v, want %v", i, o.End, want)
				}
				if waits := b.waitingOf(i) != nil; waits != (i != odd) {
					t.Errorf("envelope %d waits: %t", i, waits)
				}
			}
			l := b.letterOf(odd)
			if l.Class != record.Malformed || !strings.Contains(l.Reason, c.code) || !bytes.Equal(l.Envelope, list[odd].Raw) || l.Pos != list[odd].Pos {
				t.Errorf("the letter: %s %q, %s", l.Class, l.Reason, l.Envelope)
			}
			// Halves of 40, and then the letter. Each attempt costs one transaction.
			if b.fences > 14 {
				t.Errorf("%d transactions for one rejected envelope among %d", b.fences, all)
			}
			if n := len(b.reported()); n > 0 {
				t.Errorf("%d errors are reported as repeated: %v", n, b.reported())
			}
		})
	}
}

// An envelope that waits for several topics and cannot be stored leaves a letter for each of them, and none for others, which may have it.
func TestN16_ARejectedEnvelopeLeavesALetterForEachTopicForWhichItWaits(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	b.validate(b.waiting, without("envelope.payload", "poison"))
	several, one := b.newEnvelope(1, bson.E{Key: "payload", Value: "poison"}), b.newEnvelope(2, bson.E{Key: "payload", Value: "poison"})
	several.Topics = []string{"a", "b"}
	b.store(several, one)
	b.checkLetters(1, "a malformed", "b malformed")
	b.checkLetters(2, "a malformed")
}

// N17: an envelope that dies leaves a letter for each topic that rejected it, with its own reason, and for each topic for which it waited.
func TestN17_ADeadEnvelopeLeavesALetterForEachTopicThatDoesNotHaveIt(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	b.config.MaxAttempts, b.twice = 3, true
	l := New(b.config)
	rejected := func(topic string, class record.Class) record.Result {
		return record.Result{Topic: topic, Partition: 3, Rejection: &record.Rejection{Class: class, Reason: "no"}}
	}
	waitsFor := func(topics ...string) func(*waiting.Entry) {
		return func(e *waiting.Entry) { e.Pending, e.Attempts = topics, 2 }
	}
	stored, exhausted := b.enter(1, waitsFor("a", "b", "c")), b.enter(2, waitsFor("a", "b"))
	claimed := b.newEnvelope(3)
	expired := &record.Rejection{Class: record.Expired, Reason: "late"}
	some, all := b.enter(4, waitsFor("b", "c")), b.enter(5, waitsFor())
	b.store(
		l.Decide(stored, stored.Pending, []record.Result{rejected("a", record.MessageTooLarge), rejected("b", record.NotAllowed), {Topic: "c"}}),
		l.Decide(exhausted, exhausted.Pending, []record.Result{rejected("a", record.MessageTooLarge), rejected("b", record.RecordRejected)}),
		l.DecideClaim(nil, &waiting.Claimed{NS: b.ns(), Raw: claimed.Raw, Pos: claimed.Pos, Key: "k"}, nil,
			[]record.Result{rejected("a", record.MessageTooLarge), rejected("b", record.NotAllowed)}),
		l.Rejected(some, some.Pending, expired),
		l.Rejected(all, all.Pending, expired),
	)

	b.checkLetters(1, "a message_too_large", "b not_allowed")
	b.checkLetters(2, "a message_too_large", "b attempts_exhausted")
	b.checkLetters(3, "a message_too_large", "b not_allowed")
	b.checkLetters(4, "b expired", "c expired")
	b.checkLetters(5, " expired")
	for _, letter := range b.lettersOf(2) {
		if last := letter.Attempts[len(letter.Attempts)-1]; last.Topic != letter.Topic || letter.Partition == nil || *letter.Partition != 3 {
			t.Errorf("the letter for %s has the attempt %+v, partition %v", letter.Topic, last, letter.Partition)
		}
	}
	if n := b.count(b.waiting, bson.D{}); n != 0 {
		t.Errorf("%d wait", n)
	}
}

// checkLetters checks the topics and classes of the letters of an envelope.
func (b *bench) checkLetters(n int, want ...string) {
	b.t.Helper()
	var got []string
	for _, letter := range b.lettersOf(n) {
		got = append(got, letter.Topic+" "+string(letter.Class))
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		b.t.Errorf("envelope %d has letters for %q, want %q", n, got, want)
	}
}

// The limits of MongoDB hold for the stored document, which has the key as well as the envelope.
func TestN16_AnEnvelopeThatIsTooLargeToWaitIsADeadLetter(t *testing.T) {
	t.Parallel()
	const limit = 16 << 20
	for name, build := range map[string]func(b *bench) *Outcome{
		"a key of 9 MB": func(b *bench) *Outcome {
			key := strings.Repeat("k", 9<<20)
			o := b.newEnvelope(5, bson.E{Key: "key", Value: key})
			o.Key = key
			return o
		},
		"an envelope of nearly 16 MiB": func(b *bench) *Outcome {
			rest := limit - len(b.newEnvelope(5).Raw)
			return b.newEnvelope(5, bson.E{Key: "payload", Value: strings.Repeat("p", rest)})
		},
		"an envelope that just fits the driver": func(b *bench) *Outcome {
			rest := limit - len(b.newEnvelope(5).Raw) - 200
			return b.newEnvelope(5, bson.E{Key: "payload", Value: strings.Repeat("p", rest)})
		},
		"a deep one": func(b *bench) *Outcome {
			deep := bson.D{{Key: "d", Value: 1}}
			for range 178 {
				deep = bson.D{{Key: "d", Value: deep}}
			}
			return b.newEnvelope(5, bson.E{Key: "payload", Value: deep})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setUp(t)
			o := build(b)
			raw := o.Raw
			// The service could store it.
			if _, err := b.outbox.InsertOne(t.Context(), raw); err != nil {
				t.Fatal(err)
			}

			list := []*Outcome{b.newEnvelope(4), o, b.newEnvelope(6)}
			b.store(list...)
			if list[0].End != Waiting || list[2].End != Waiting || b.waitingOf(4) == nil || b.waitingOf(6) == nil {
				t.Error("the others do not wait")
			}
			if o.End != Dead || b.waitingOf(5) != nil {
				t.Fatalf("it is %v", o.End)
			}
			if l := b.letterOf(5); !bytes.Equal(l.Envelope, raw) || !strings.Contains(l.Reason, "MongoDB cannot store it") {
				t.Errorf("the letter has %d bytes of %d, reason %q", len(l.Envelope), len(raw), l.Reason)
			}
			if n := len(b.reported()); n > 0 {
				t.Errorf("%d errors are reported as repeated: %v", n, b.reported())
			}
		})
	}
}

// If the letters reject the envelope as well, a letter with the id and the reason is left.
func TestN16_ALetterThatIsRejectedIsReducedToItsID(t *testing.T) {
	t.Parallel()
	poison := bson.E{Key: "payload", Value: "poison"}
	for name, c := range map[string]struct {
		outcome func(b *bench) *Outcome
		class   record.Class
		reason  string
		waits   bool
	}{
		"an envelope that has to wait": {
			outcome: func(b *bench) *Outcome { return b.newEnvelope(5, poison) }, class: record.Malformed, reason: "MongoDB cannot store it",
		},
		"a dead envelope of the stream": {
			outcome: func(b *bench) *Outcome {
				o := b.newEnvelope(5, poison)
				o.End, o.Rejection, o.Topic = Dead, record.Rejection{Class: record.MessageTooLarge, Reason: "3 MB, limit 1 MB"}, "a"
				return o
			},
			class: record.MessageTooLarge, reason: "3 MB, limit 1 MB",
		},
		"a waiting envelope that dies": {
			outcome: func(b *bench) *Outcome {
				d := b.enter(5, func(e *waiting.Entry) { e.Raw = b.newEnvelope(5, poison).Raw })
				return New(b.config).Decide(d, []string{"a"}, []record.Result{{Topic: "a", Rejection: &record.Rejection{Class: record.MessageTooLarge, Reason: "3 MB, limit 1 MB"}}})
			},
			class: record.MessageTooLarge, reason: "3 MB, limit 1 MB",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setUp(t)
			o := c.outcome(b)
			b.validate(b.waiting, without("envelope.payload", "poison"))
			b.validate(b.letters, without("envelope.payload", "poison"))

			list := []*Outcome{b.newEnvelope(4), o, b.newEnvelope(6)}
			b.store(list...)
			if b.waitingOf(4) == nil || b.waitingOf(6) == nil || b.waitingOf(5) != nil || o.End != Dead {
				t.Errorf("outcomes %v", list)
			}
			l := b.letterOf(5)
			if want := b.marshal(bson.D{{Key: "_id", Value: "e000005"}}); !bytes.Equal(l.Envelope, want) {
				t.Errorf("the letter has the envelope %s", l.Envelope)
			}
			if l.Class != c.class || !strings.Contains(l.Reason, c.reason) || !strings.Contains(l.Reason, "code 121") || l.Pos != "82000005" {
				t.Errorf("the letter: %s %q at %s", l.Class, l.Reason, l.Pos)
			}
		})
	}
}

// If MongoDB rejects every letter, also one with an id only, the envelope is not at fault, and must not lose its body.
func TestN16_AStateDatabaseThatRejectsEverythingLosesNothing(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	nothing := bson.D{{Key: "never", Value: 1}}
	b.validate(b.waiting, nothing)
	b.validate(b.letters, nothing)

	list := []*Outcome{b.newEnvelope(1), b.newEnvelope(2), b.newEnvelope(3)}
	ended := make(chan error, 1)
	go func() { _, err := b.tryStore(t.Context(), New(b.config), list...); ended <- err }()
	stacktest.Eventually(t, "it is reported", func() bool { return len(b.reported()) > 1 })
	select {
	case err := <-ended:
		t.Fatalf("the outcomes are stored: %v", err)
	default:
	}
	b.validate(b.waiting, nil)
	b.validate(b.letters, nil)
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	for i := 1; i <= 3; i++ {
		if b.waitingOf(i) == nil || len(b.lettersOf(i)) > 0 {
			t.Errorf("envelope %d waits: %t, and has %d letters", i, b.waitingOf(i) != nil, len(b.lettersOf(i)))
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.recovered != 1 {
		t.Errorf("the problem is reported as over %d times, want once", b.recovered)
	}
}

// countWaiting returns a judge that lets no transaction add more than most waiting envelopes, as a server whose cache is full.
func (b *bench) countWaiting(most int64, tooMany error) func(tx context.Context) error {
	return func(tx context.Context) error {
		coll := mongodb.InClient(mongo.SessionFromContext(tx).Client(), b.waiting)
		inside, err := coll.CountDocuments(tx, bson.D{})
		if err != nil {
			return err
		}
		outside, err := b.waiting.CountDocuments(b.t.Context(), bson.D{})
		if err == nil && inside-outside > most {
			return tooMany
		}
		return err
	}
}

// A transaction that is too large for the server's cache is written in halves. The real server needs gigabytes for this error.
func TestN03_ATransactionThatIsTooLargeForTheCacheIsHalved(t *testing.T) {
	t.Parallel()
	const all, most = 100, 20
	b := setUp(t)
	b.judge = b.countWaiting(most, mongo.CommandError{Code: 388, Name: "TransactionTooLargeForCache", Message: "too large"})
	var list []*Outcome
	for i := range all {
		list = append(list, b.newEnvelope(i))
	}

	for i, o := range b.store(list...) {
		if o.End != Waiting || o != list[i] {
			t.Errorf("envelope %d: %v", i, o.End)
		}
	}
	if n := b.count(b.waiting, bson.D{}); n != all {
		t.Errorf("%d of %d wait", n, all)
	}
	if n := b.count(b.letters, bson.D{}); n != 0 {
		t.Errorf("%d letters", n)
	}
}

// N3: a write that is too large for one transaction, because the server is slow and the lease short, is divided.
// Otherwise it would be repeated forever, and the resolved position would not move. The next one begins small.
func TestN03_ATransactionThatNeverEndsInTimeIsMadeSmaller(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	slow := &stacktest.Hasty{Fence: b, Coll: b.waiting, Most: 40}
	b.config.Fencer = slow
	l := New(b.config)

	for round := range 2 {
		var list []*Outcome
		for i := range 300 {
			list = append(list, b.newEnvelope(1000*round+i))
		}
		before := slow.Late.Load()
		if stored, err := b.tryStore(ctx, l, list...); err != nil || len(stored) != 300 {
			t.Fatalf("%d of 300 after %d in vain: %v", len(stored), slow.Late.Load(), err)
		}
		if n := slow.Late.Load() - before; round > 0 && n > 10 {
			t.Errorf("%d attempts in vain at the second list", n)
		}
	}
	if n := b.count(b.waiting, bson.D{}); n != 600 {
		t.Errorf("%d of 600 wait", n)
	}
}

// The same for the ends of waiting envelopes and for marks of deliveries.
func TestN03_FatesAreWrittenInPartsIfTheServerIsSlow(t *testing.T) {
	t.Parallel()
	const all = 80
	for name, c := range map[string]struct {
		change End
		done   bson.D
		coll   func(b *bench) *mongo.Collection
	}{
		"retries": {Retrying, bson.D{{Key: "attempts", Value: 1}}, func(b *bench) *mongo.Collection { return b.waiting }},
		"letters": {Dead, bson.D{}, func(b *bench) *mongo.Collection { return b.letters }},
		"marks":   {Sent, bson.D{{Key: "sentAt", Value: bson.D{{Key: "$exists", Value: true}}}}, func(b *bench) *mongo.Collection { return b.outbox }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setUp(t)
			ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
			defer cancel()
			slow := &stacktest.Hasty{Fence: b, Coll: c.coll(b), Done: c.done, Most: 5}
			b.config.Fencer, b.config.Recording = slow, RecordMark
			l := New(b.config)

			var docs []any
			for i := range all {
				docs = append(docs, b.newEnvelope(i).Raw)
			}
			if _, err := b.outbox.InsertMany(ctx, docs); err != nil {
				t.Fatal(err)
			}
			for from := range 2 {
				var list []*Outcome
				for i := range all / 2 {
					d := b.enter(from*all/2 + i)
					o := l.Decide(d, []string{"a"}, []record.Result{{Topic: "a", Offset: int64(i)}})
					if c.change == Retrying {
						o = l.Decide(d, []string{"a"}, []record.Result{{Topic: "a", Rejection: newRejection("not yet")}})
					}
					if c.change == Dead {
						o = l.Rejected(d, []string{"a"}, &record.Rejection{Class: record.Malformed, Reason: "no type"})
					}
					o.Recorded = true
					list = append(list, o)
				}
				before := slow.Late.Load()
				if stored, err := b.tryStore(ctx, l, list...); err != nil || len(stored) != all/2 {
					t.Fatalf("%d after %d in vain: %v", len(stored), slow.Late.Load(), err)
				}
				// Deliveries of each list are marked together, so marks begin large again.
				if n := slow.Late.Load() - before; from > 0 && n > 12 && c.change != Sent {
					t.Errorf("%d attempts in vain at the second list", n)
				}
			}
			if n := b.count(c.coll(b), c.done); n != all {
				t.Errorf("%d of %d are written", n, all)
			}
		})
	}
}

// Errors of the server, its members and its users are no fault of an envelope: the write is repeated and reported.
func TestN08_ErrorsOfTheEnvironmentAreRepeatedAndLoseNothing(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		fault    bson.D
		repeated bool // by the ledger; the fence repeats the others
	}{
		"the user lost a right": {bson.D{{Key: "failCommands", Value: bson.A{"update"}}, {Key: "errorCode", Value: 13}}, true},
		"the disk is full":      {bson.D{{Key: "failCommands", Value: bson.A{"update"}}, {Key: "errorCode", Value: 14031}}, true},
		"an election": {bson.D{
			{Key: "failCommands", Value: bson.A{"update"}},
			{Key: "errorCode", Value: 189},
			{Key: "errorLabels", Value: bson.A{"TransientTransactionError"}},
		}, false},
		"the connection breaks": {bson.D{{Key: "failCommands", Value: bson.A{"update"}}, {Key: "closeConnection", Value: true}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setUp(t)
			list := []*Outcome{b.newEnvelope(1), b.newEnvelope(2)}
			reached, off := stacktest.FailAlways(t, b.app, c.fault)
			ended := make(chan error, 1)
			go func() { _, err := b.tryStore(t.Context(), New(b.config), list...); ended <- err }()
			reached()
			if c.repeated {
				stacktest.Eventually(t, "it is reported", func() bool { return len(b.reported()) > 1 })
			}
			select {
			case err := <-ended:
				t.Fatalf("the outcomes are stored: %v", err)
			default:
			}

			off()
			if err := <-ended; err != nil {
				t.Fatal(err)
			}
			for i := 1; i <= 2; i++ {
				if b.waitingOf(i) == nil {
					t.Errorf("envelope %d does not wait", i)
				}
			}
			if n := b.count(b.letters, bson.D{}); n != 0 {
				t.Errorf("%d letters", n)
			}
			if c.repeated && b.recovered == 0 {
				t.Error("the end of the problem is not reported")
			}
		})
	}
}

// N3: a deposed owner stores nothing, and reports nothing as stored.
func TestN03_ADeposedOwnerStoresNothing(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	d := b.enter(1)
	l := New(b.config)
	_, err := b.state.Collection("watchers").UpdateOne(t.Context(), bson.D{}, bson.D{{Key: "$set", Value: bson.D{
		{Key: "owner", Value: "b#1"}, {Key: "epoch", Value: int64(99)}, {Key: "expiresAt", Value: time.Now().Add(time.Hour)},
	}}})
	if err != nil {
		t.Fatal(err)
	}

	stored, err := b.tryStore(t.Context(), l, b.newEnvelope(2), l.Decide(d, []string{"a"}, []record.Result{{Topic: "a"}}))
	if !errors.Is(err, lease.ErrLeaseLost) || len(stored) > 0 {
		t.Errorf("%d are reported as stored, %v", len(stored), err)
	}
	if b.waitingOf(1) == nil || b.waitingOf(2) != nil {
		t.Error("a deposed owner has written")
	}
}

// The end of the context, as at a stop, ends the repetition.
func TestAStopEndsTheRepetition(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	b.validate(b.waiting, bson.D{{Key: "never", Value: 1}})
	b.validate(b.letters, bson.D{{Key: "never", Value: 1}})
	stop := fmt.Errorf("stop")
	ctx, cancel := context.WithCancelCause(t.Context())

	ended := make(chan error, 1)
	go func() { _, err := b.tryStore(ctx, New(b.config), b.newEnvelope(1)); ended <- err }()
	stacktest.Eventually(t, "it is reported", func() bool { return len(b.reported()) > 0 })
	cancel(stop)
	if err := <-ended; !errors.Is(err, stop) {
		t.Errorf("%v, want the cause", err)
	}
}

// MongoDB rejects the removal of a claim. No envelope is at fault: there is no letter, and the log does not name one. The removal is repeated until MongoDB
// accepts it.
func TestN16_ARejectedRemovalOfAClaimIsRepeated(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	b.config.Claims = b.state.Collection(waiting.ClaimsName)
	var log bytes.Buffer
	b.config.Log = slog.New(slog.NewTextHandler(&log, nil))
	claim := &waiting.Claim{ID: waiting.NewClaimID("orders/0of1"), Envelopes: []waiting.Claimed{{NS: b.ns(), Key: "k", Pos: "82", Raw: b.newEnvelope(1).Raw}}}
	if err := waiting.InsertClaim(t.Context(), b.config.Claims, claim); err != nil {
		t.Fatal(err)
	}

	rejections := 2
	b.judge = func(context.Context) error {
		if rejections > 0 {
			rejections--
			return mongo.CommandError{Code: 121, Message: "rejected by the test"}
		}
		return nil
	}
	b.store(&Outcome{Claim: &ClaimRef{ID: claim.ID, Ends: true}})
	if n, err := waiting.CountClaimed(t.Context(), b.config.Claims, "orders"); err != nil || n != 0 {
		t.Errorf("%d envelopes are claimed, %v", n, err)
	}
	if n, err := b.letters.CountDocuments(t.Context(), bson.D{}); err != nil || n != 0 {
		t.Errorf("%d letters, %v", n, err)
	}
	text := log.String()
	if strings.Contains(text, "dead letter") || !strings.Contains(text, claim.ID) || rejections > 0 {
		t.Errorf("after all but %d rejections, the log is %s", rejections, text)
	}
}
