package consumer_test

import (
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// TestRestoredEffects restores the database of a consumer as docs/operate/backup.md describes: the offset of the group is set to an earlier
// record than the backup has. The restored marks and watermarks recognize the records that the backup has handled, and the others have
// their effect again.
func TestRestoredEffects(t *testing.T) {
	t.Parallel()
	const inBackup, all = 60, 100
	k := newKit(t, 1)
	list := newMessages(10, all)
	handleUntil := func(total int) {
		t.Helper()
		c := k.newConsumer()
		addHandler(t, c, "counted", k.insertInto("effects"))
		stop := k.start(c)
		k.waitCount("effects", total)
		// The stop commits the offset.
		stop()
	}

	k.publish(list[:inBackup]...)
	handleUntil(inBackup)
	backup := k.copyDatabase()
	k.publish(list[inBackup:]...)
	handleUntil(all)

	k.restoreDatabase(backup)
	if n := k.readCommitted(1)[0]; n != all {
		t.Fatalf("the group has committed %d of %d records", n, all)
	}
	k.commitOffset(inBackup/2, "")
	handleUntil(all)
	k.checkOnce("effects", all)
}

// copyDatabase returns the documents of all collections, by name.
func (k *kit) copyDatabase() map[string][]bson.Raw {
	k.Helper()
	names, err := k.db.ListCollectionNames(k.context(), bson.D{})
	if err != nil {
		k.Fatal(err)
	}
	backup := map[string][]bson.Raw{}
	for _, name := range names {
		cur, err := k.db.Collection(name).Find(k.context(), bson.D{})
		var docs []bson.Raw
		if err == nil {
			err = cur.All(k.context(), &docs)
		}
		if err != nil {
			k.Fatal(err)
		}
		backup[name] = docs
	}
	return backup
}

// restoreDatabase replaces the documents of all collections by those of the backup.
func (k *kit) restoreDatabase(backup map[string][]bson.Raw) {
	k.Helper()
	for name, docs := range backup {
		coll := k.db.Collection(name)
		_, err := coll.DeleteMany(k.context(), bson.D{})
		if err == nil && len(docs) > 0 {
			_, err = coll.InsertMany(k.context(), docs)
		}
		if err != nil {
			k.Fatal(err)
		}
	}
}
