package deadletter

import (
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/state"
)

// newNamedBench returns a bench whose client has an app name, for the fail point.
func newNamedBench(t *testing.T) (b *bench, app string) {
	t.Helper()
	app = stacktest.Name(t)
	db := stacktest.Database(t, stacktest.Client(t, options.Client().SetAppName(app)))
	return &bench{t: t, db: db, state: state.Of(db), owner: &countingOwner{Held: acquireLease(t, state.Of(db), "a")}}, app
}

// Each statement and each commit of a server that is far away takes as long for one letter as for many. Smaller parts would only
// need more of them.
func TestPartsStayLargeIfTheServerIsFarAway(t *testing.T) {
	t.Parallel()
	b, app := newNamedBench(t)

	const n = 1000
	letters := make([]Letter, n)
	docs := make([]any, n)
	for i := range letters {
		doc := bson.D{{Key: "_id", Value: i}, {Key: "aggregatetype", Value: "order"}}
		docs[i], letters[i] = doc, b.newLetter(doc)
	}
	if _, err := b.db.Collection("outbox").InsertMany(t.Context(), docs); err != nil {
		t.Fatal(err)
	}

	off := stacktest.FailCommand(t, app, "alwaysOn", bson.D{
		{Key: "failCommands", Value: bson.A{"commitTransaction"}}, {Key: "blockConnection", Value: true}, {Key: "blockTimeMS", Value: 400},
	})
	defer off()
	before := b.owner.transactions
	b.move(letters...)
	if got := b.owner.transactions - before; got > 8 {
		t.Errorf("%d letters took %d transactions, want at most 8", n, got)
	}
}

// N3: while a requeue holds the fence, the owner cannot renew its lease. So a requeue whose transactions are too
// slow makes them smaller.
func TestARequeueGetsSmallerIfItIsSlow(t *testing.T) {
	t.Parallel()
	b, app := newNamedBench(t)
	b.fill(requeueAtOnce, order)

	// An owner whose renewal times out interrupts the transaction.
	interrupted := bson.D{{Key: "failCommands", Value: bson.A{"commitTransaction"}}, {Key: "errorCode", Value: 11601}}
	off := stacktest.FailCommand(t, app, bson.D{{Key: "times", Value: 3}}, interrupted)
	defer off()

	var parts []int64
	got, err := b.newDesk().Requeue(t.Context(), b.ns(), Query{All: true}, Options{}, func(o Outcome) { parts = append(parts, o.Requeued) })
	if err != nil || got.Requeued != requeueAtOnce || b.countDocuments("outbox") != requeueAtOnce {
		t.Errorf("got %+v, %v and %d in the outbox, want %d requeued", got, err, b.countDocuments("outbox"), requeueAtOnce)
	}
	if len(parts) == 0 || parts[0] != requeueAtOnce/4 {
		t.Errorf("totals after each part: got %v, want %d after the first one", parts, requeueAtOnce/4)
	}
}

func TestAPartHasAtMostItsLettersAndBytes(t *testing.T) {
	t.Parallel()
	small := preparedLetter{}
	large := preparedLetter{dead: Dead{Content: Content{Envelope: make([]byte, mongodb.MaxBytes/2)}}}
	many := make([]preparedLetter, 2*mongodb.MaxDocuments)

	for _, c := range []struct {
		rest        []preparedLetter
		limit, want int
	}{
		{many, mongodb.MaxDocuments, mongodb.MaxDocuments},
		{many, 25, 25},
		{many[:3], 25, 3},
		{[]preparedLetter{large, large, large}, 25, 1},
		{[]preparedLetter{large, small, small, large}, 25, 3},
		{nil, 25, 0},
	} {
		if got := mongodb.CountFitting(c.rest, c.limit, (*preparedLetter).estimateSize); got != c.want {
			t.Errorf("countFitting of %d letters with limit %d: got %d, want %d", len(c.rest), c.limit, got, c.want)
		}
	}
}
