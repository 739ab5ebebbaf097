package resume_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/resume"
)

func ExampleToken() {
	token := resume.TokenOf("8266A1B2C3000000052B0229296E04")
	ts, ok := token.ClusterTime()
	fmt.Println(token.Data(), ts.T, ts.I, ok)
	// Output: 8266A1B2C3000000052B0229296E04 1721873091 5 true
}

func ExamplePosition_Compare() {
	earlier := resume.Position{Token: resume.TokenOf("8266A1B2C30000000529")}
	later := resume.Position{Token: resume.TokenOf("8266A1B2C30000000629")}
	byTime := resume.Position{ClusterTime: bson.Timestamp{T: 0x66A1B2C3, I: 6}}
	fmt.Println(earlier.Compare(later), later.Compare(byTime), later.Compare(later))
	// Output: -1 1 0
}

func ExampleStore() {
	ctx := context.Background()
	store := resume.NewMemory() // or resume.NewMongo(db.Collection("checkpoints"))
	at := func(data string) resume.Checkpoint {
		return resume.Checkpoint{Position: resume.Position{Token: resume.TokenOf(data)}}
	}

	_, err := store.Load(ctx, "orders")
	fmt.Println(errors.Is(err, resume.ErrNotFound))
	fmt.Println(store.Save(ctx, "orders", at("8266A1B2C30000000629")))
	err = store.Save(ctx, "orders", at("8266A1B2C30000000529"))
	fmt.Println(errors.Is(err, resume.ErrStale), err)
	// Output:
	// true
	// <nil>
	// true saving checkpoint "orders": checkpoint goes back
}

// Each consumer of a change stream has its checkpoint in one collection.
func ExampleNewMongo() {
	var (
		ctx context.Context
		db  *mongo.Database
	)
	store := resume.NewMongo(db.Collection("checkpoints"))
	checkpoint, err := store.Load(ctx, "orders")
	if err != nil && !errors.Is(err, resume.ErrNotFound) {
		log.Fatal(err)
	}

	// … open the change stream after checkpoint.Position, and handle its events.
	checkpoint.Position = resume.Position{Token: resume.TokenOf("8266A1B2C30000000629")}
	if err := store.Save(ctx, "orders", checkpoint); err != nil {
		log.Fatal(err)
	}
}
