package deadletter

import (
	"context"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
)

func TestPartsFitTheServer(t *testing.T) {
	t.Parallel()
	p := newPace()
	for range 10 {
		p.recordDuration(10*time.Millisecond, p.partSize)
	}
	if p.partSize != mongodb.MaxDocuments {
		t.Errorf("after fast parts: part size %d, want %d", p.partSize, mongodb.MaxDocuments)
	}
	p.recordDuration(200*time.Millisecond, p.partSize)
	if p.partSize != mongodb.MaxDocuments {
		t.Errorf("after a part of medium speed: part size %d, want %d", p.partSize, mongodb.MaxDocuments)
	}

	// This part had fewer letters than allowed, because of its bytes.
	p.recordDuration(time.Second, 300)
	if p.partSize != 150 {
		t.Errorf("after a slow part of 300: part size %d, want 150", p.partSize)
	}
	p.recordDuration(time.Millisecond, 10)
	if p.partSize != 150 {
		t.Errorf("after a small part: part size %d, want 150", p.partSize)
	}

	for range 10 {
		p.recordDuration(time.Duration(p.partSize)*20*time.Millisecond, p.partSize)
	}
	if p.partSize != minPartSize {
		t.Errorf("after slow parts: part size %d, want %d", p.partSize, minPartSize)
	}
	p.recordTimeout(20)
	p.recordDuration(time.Second, 5)
	if p.partSize != 5 {
		t.Errorf("after a timeout of a part of 20: part size %d, want 5", p.partSize)
	}
}

// Each statement and each commit of a server that is far away takes as long for one letter as for many. Smaller parts would only
// need more of them.
func TestPartsStayLargeIfTheServerIsFarAway(t *testing.T) {
	t.Parallel()
	app := stacktest.Name(t)
	client, err := mongo.Connect(options.Client().ApplyURI(stacktest.MongoURI(t)).SetAppName(app))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Disconnect(context.WithoutCancel(t.Context())) })
	db := stacktest.Database(t, client)
	b := &bench{t: t, db: db, owner: &countingOwner{Held: acquireLease(t, db, "a")}}

	const n = 1000
	letters := make([]Letter, n)
	docs := make([]any, n)
	for i := range letters {
		doc := bson.D{{Key: "_id", Value: i}, {Key: "aggregatetype", Value: "order"}}
		docs[i], letters[i] = doc, b.letter(doc)
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

func TestAPartHasAtMostItsLettersAndBytes(t *testing.T) {
	t.Parallel()
	small := preparedLetter{}
	large := preparedLetter{dead: Dead{Envelope: make([]byte, mongodb.MaxBytes/2)}}
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
