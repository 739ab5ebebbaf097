package guard_test

import (
	"context"
	"errors"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/outbox/guard"
)

func (b bundle) collection(opts ...guard.Option) *guard.Collection {
	return guard.NewCollection(b.db.Collection("orders"), opts...)
}

// listOrders returns the _id of all business documents.
func (b bundle) listOrders(t *testing.T) []string {
	t.Helper()
	ids := []string{}
	cur, err := b.db.Collection("orders").Find(t.Context(), bson.D{}, options.Find().SetSort(id("_id", 1)))
	if err != nil {
		t.Fatal(err)
	}

	for cur.Next(t.Context()) {
		ids = append(ids, cur.Current.Lookup("_id").StringValue())
	}

	if err := cur.Err(); err != nil {
		t.Fatal(err)
	}

	return ids
}

func id(name string, v any) bson.D { return bson.D{{Key: name, Value: v}} }

// just drops the result of a call and returns its error.
func just[R any](_ R, err error) error { return err }

// verbs contains all methods of a Collection that send a command.
var verbs = map[string]func(context.Context, *guard.Collection) error{
	"InsertOne": func(ctx context.Context, c *guard.Collection) error {
		return just(c.InsertOne(ctx, id("_id", "new")))
	},
	"InsertMany": func(ctx context.Context, c *guard.Collection) error {
		return just(c.InsertMany(ctx, []bson.D{id("_id", "new"), id("_id", "newer")}))
	},
	"ReplaceOne": func(ctx context.Context, c *guard.Collection) error {
		return just(c.ReplaceOne(ctx, id("_id", "a"), id("x", 1)))
	},
	"UpdateOne": func(ctx context.Context, c *guard.Collection) error {
		return just(c.UpdateOne(ctx, id("_id", "a"), id("$set", id("x", 1))))
	},
	"UpdateMany": func(ctx context.Context, c *guard.Collection) error {
		return just(c.UpdateMany(ctx, bson.D{}, id("$set", id("x", 1))))
	},
	"DeleteOne": func(ctx context.Context, c *guard.Collection) error {
		return just(c.DeleteOne(ctx, id("_id", "a")))
	},
	"DeleteMany": func(ctx context.Context, c *guard.Collection) error {
		return just(c.DeleteMany(ctx, bson.D{}))
	},
	"BulkWrite": func(ctx context.Context, c *guard.Collection) error {
		return just(c.BulkWrite(ctx, []mongo.WriteModel{mongo.NewInsertOneModel().SetDocument(id("_id", "bulk"))}))
	},
	"FindOneAndUpdate": func(ctx context.Context, c *guard.Collection) error {
		return c.FindOneAndUpdate(ctx, id("_id", "a"), id("$set", id("x", 1))).Err()
	},
	"FindOneAndReplace": func(ctx context.Context, c *guard.Collection) error {
		return c.FindOneAndReplace(ctx, id("_id", "a"), id("x", 1)).Err()
	},
	"FindOneAndDelete": func(ctx context.Context, c *guard.Collection) error {
		return c.FindOneAndDelete(ctx, id("_id", "a")).Err()
	},
	"Find": func(ctx context.Context, c *guard.Collection) error {
		cur, err := c.Find(ctx, bson.D{})
		if err != nil {
			return err
		}
		return cur.All(ctx, new([]bson.Raw))
	},
	"FindOne": func(ctx context.Context, c *guard.Collection) error {
		return c.FindOne(ctx, id("_id", "a")).Decode(new(bson.Raw))
	},
	"CountDocuments": func(ctx context.Context, c *guard.Collection) error { return just(c.CountDocuments(ctx, bson.D{})) },
	"Aggregate": func(ctx context.Context, c *guard.Collection) error {
		cur, err := c.Aggregate(ctx, mongo.Pipeline{id("$match", bson.D{})})
		if err != nil {
			return err
		}
		return cur.All(ctx, new([]bson.Raw))
	},
}

// Each method runs in the transaction, and rejects all other contexts before it sends a command.
func TestCollectionIsBoundToTheTransaction(t *testing.T) {
	t.Parallel()
	for name, verb := range verbs {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := new(watch)
			b, ctx := setup(t, w.options().SetWriteConcern(writeconcern.W1()).SetReadPreference(readpref.SecondaryPreferred())), t.Context()
			if _, err := b.db.Collection("orders").InsertOne(ctx, id("_id", "a")); err != nil {
				t.Fatal(err)
			}

			c := b.collection()
			seen := len(w.cmds)
			if err := verb(ctx, c); !errors.Is(err, outbox.ErrNoTransaction) || len(w.cmds) != seen {
				t.Errorf("without a transaction: %v", err)
			}

			no := errors.New("no")
			var leaked context.Context
			err := b.box.Transaction(ctx, func(ctx context.Context) error {
				leaked, seen = ctx, len(w.cmds)
				if err := verb(t.Context(), c); !errors.Is(err, outbox.ErrNoTransaction) {
					t.Errorf("with the context from outside: %v", err)
				}

				if n := len(w.cmds); n != seen {
					t.Errorf("%d rejected operations were sent", n-seen)
				}

				if err := verb(ctx, c); err != nil {
					// A new collection can be a reason to repeat the transaction.
					return err
				}

				if auto, err := w.cmds[len(w.cmds)-1].LookupErr("autocommit"); err != nil || auto.Boolean() {
					t.Errorf("outside of the transaction: %s", w.cmds[len(w.cmds)-1])
				}

				return no
			})
			if !errors.Is(err, no) {
				t.Fatal(err)
			}

			if err := verb(leaked, c); !errors.Is(err, outbox.ErrTransactionEnded) {
				t.Errorf("with a leaked context: %v", err)
			}

			if err := verb(leaked, b.collection(guard.WithoutTransaction())); !errors.Is(err, outbox.ErrTransactionEnded) {
				t.Errorf("a plain collection with a leaked context: %v", err)
			}

			var doc bson.Raw
			if err := b.db.Collection("orders").FindOne(ctx, bson.D{}).Decode(&doc); err != nil || len(b.listOrders(t)) != 1 || len(doc) != len(mustRaw(t, id("_id", "a"))) {
				t.Errorf("after the rollback: %s, %v", doc, err)
			}
		})
	}
}

func mustRaw(t *testing.T, d bson.D) bson.Raw {
	t.Helper()
	raw, err := bson.Marshal(d)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// If allowed, the same handler runs with and without a transaction. Without one, a write waits for
// a majority.
func TestCollectionWithoutTransaction(t *testing.T) {
	t.Parallel()
	w := new(watch)
	b, ctx := setup(t, w.options().SetWriteConcern(writeconcern.W1())), t.Context()
	c, box := b.collection(guard.WithoutTransaction()), b.newBox(t, outbox.WithoutTransaction())
	handler := func(ctx context.Context, order string) error {
		if in := outbox.CheckTransaction(ctx) == nil; in != (order == "with") {
			t.Errorf("%s: in a transaction: %t", order, in)
		}

		if _, err := c.InsertOne(ctx, id("_id", order)); err != nil {
			return err
		}

		return box.Append(ctx, newEvent(order))
	}
	if err := handler(ctx, "alone"); err != nil {
		t.Fatal(err)
	}

	if got := w.lastCommand(t, "insert").Lookup("writeConcern", "w").StringValue(); got != "majority" {
		t.Errorf("a plain write of a w:1 client has w %q", got)
	}

	if err := b.box.Transaction(ctx, func(ctx context.Context) error { return handler(ctx, "with") }); err != nil {
		t.Fatal(err)
	}

	b.checkTypes(t, "alone", "with")
	if got := b.listOrders(t); len(got) != 2 {
		t.Errorf("orders %v", got)
	}
}

// If the server has rejected a command, the transaction is aborted: if the callback ignores the
// error, it gets ErrRollbackOnly at once. A command that was never sent, or an empty result, has no
// such effect.
func TestServersErrorInACollectionEndsTheTransaction(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		op   func(ctx context.Context, c *guard.Collection) error
		ends bool
	}{
		"duplicate key": {func(ctx context.Context, c *guard.Collection) error {
			return just(c.InsertOne(ctx, id("_id", "a")))
		}, true},
		"bad filter": {func(ctx context.Context, c *guard.Collection) error {
			return c.FindOne(ctx, id("x", id("$nonsense", 1))).Err()
		}, true},
		"nothing found": {func(ctx context.Context, c *guard.Collection) error { return c.FindOne(ctx, id("_id", "b")).Err() }, false},
		"rejected by the driver": {func(ctx context.Context, c *guard.Collection) error {
			return just(c.UpdateOne(ctx, bson.D{}, id("x", 1)))
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b, runs := setup(t), 0
			coll := b.collection()
			if _, err := b.db.Collection("orders").InsertOne(t.Context(), id("_id", "a")); err != nil {
				t.Fatal(err)
			}

			err := b.box.Transaction(t.Context(), func(ctx context.Context) error {
				runs++
				if err := c.op(ctx, coll); err == nil {
					t.Error("no error")
				}

				err := just(coll.InsertOne(ctx, id("_id", "c")))
				if errors.Is(err, outbox.ErrRollbackOnly) != c.ends || !c.ends && err != nil {
					t.Errorf("the next operation: %v", err)
				}

				return nil
			})
			if errors.Is(err, outbox.ErrRollbackOnly) != c.ends || !c.ends && err != nil || runs != 1 {
				t.Errorf("after %d runs: %v", runs, err)
			}
		})
	}
}

func TestCollectionWithExplicitSession(t *testing.T) {
	t.Parallel()
	b, other := setup(t), setup(t)
	coll := b.collection()
	sess, err := b.client.StartSession()
	if err != nil {
		t.Fatal(err)
	}

	defer sess.EndSession(t.Context())
	no := errors.New("no")
	if err := b.box.Transaction(t.Context(), func(ctx context.Context) error {
		explicit := mongo.NewSessionContext(ctx, sess)
		if err := just(coll.InsertOne(explicit, id("_id", "x"))); !errors.Is(err, outbox.ErrNoTransaction) {
			t.Errorf("the explicit session has no transaction: %v", err)
		}

		if err := sess.StartTransaction(); err != nil {
			return err
		}

		if err := just(coll.InsertOne(explicit, id("_id", "explicit"))); err != nil {
			t.Error(err)
		}

		if err := sess.CommitTransaction(ctx); err != nil {
			t.Error(err)
		}

		if err := just(coll.InsertOne(ctx, id("_id", "ambient"))); err != nil {
			t.Error(err)
		}

		return no
	}); !errors.Is(err, no) {
		t.Error(err)
	}

	if got := b.listOrders(t); len(got) != 1 || got[0] != "explicit" {
		t.Errorf("orders %v", got)
	}

	if err := other.box.Transaction(t.Context(), func(ctx context.Context) error {
		return just(coll.InsertOne(ctx, id("_id", "other")))
	}); !errors.Is(err, mongo.ErrWrongClient) {
		t.Errorf("a transaction of another client: %v", err)
	}
}

// A write conflict does not concern the callbacks: the later transaction runs again.
func TestCollectionConflictRunsAgain(t *testing.T) {
	t.Parallel()
	b, runs := setup(t), 0
	coll := b.collection()
	if _, err := b.db.Collection("orders").InsertOne(t.Context(), bson.D{{Key: "_id", Value: "a"}, {Key: "n", Value: 0}}); err != nil {
		t.Fatal(err)
	}

	inc := id("$inc", id("n", 1))
	if err := b.box.Transaction(t.Context(), func(ctx context.Context) error {
		runs++
		if err := coll.FindOne(ctx, id("_id", "a")).Err(); err != nil { // the snapshot is taken
			return err
		}

		if runs == 1 {
			if err := just(b.db.Collection("orders").UpdateOne(t.Context(), id("_id", "a"), inc)); err != nil {
				return err
			}
		}

		// The function ignores this error. The transaction is still retried.
		_ = just(coll.UpdateOne(ctx, id("_id", "a"), inc))
		return b.box.Append(ctx, newEvent("counted", event.WithID("e")))
	}); err != nil {
		t.Fatal(err)
	}

	var doc struct{ N int }
	if err := b.db.Collection("orders").FindOne(t.Context(), id("_id", "a")).Decode(&doc); err != nil || doc.N != 2 || runs != 2 {
		t.Errorf("n %d after %d runs: %v", doc.N, runs, err)
	}

	b.checkTypes(t, "counted")
}
