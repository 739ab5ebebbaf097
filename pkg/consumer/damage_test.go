package consumer_test

import (
	"context"
	"encoding/binary"
	"hash/crc32"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
)

// editBatch lets a test change the bytes of the batch at an offset, in the file of the broker that has the first partition. The
// broker has to run on this machine.
func (k *kit) editBatch(offset uint64, edit func(batch []byte)) {
	k.Helper()
	adm, done := k.newAdmin()
	defer done()
	dirs, err := adm.DescribeAllLogDirs(k.context(), nil)
	if err != nil {
		k.Fatal(err)
	}

	for _, dir := range dirs.Sorted() {
		path := filepath.Join(dir.Dir, k.topic+"-0", "00000000000000000000.log")
		log, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		for at := 0; at < len(log); at += 12 + int(binary.BigEndian.Uint32(log[at+8:])) {
			if binary.BigEndian.Uint64(log[at:]) != offset {
				continue
			}
			batch := log[at : at+12+int(binary.BigEndian.Uint32(log[at+8:]))]
			edit(batch)
			f, err := os.OpenFile(path, os.O_WRONLY, 0)
			if err != nil {
				k.Fatal(err)
			}
			defer f.Close()
			if _, err := f.WriteAt(batch, int64(at)); err != nil {
				k.Fatal(err)
			}
			return
		}
	}

	k.Fatalf("no file of topic %s with a batch at offset %d: the broker has to run on this machine", k.topic, offset)
}

// Damaged bytes in the log of a broker cost the records that they were, and nothing else. One dead letter has the reason.
func TestABatchThatCannotBeReadIsOneDeadLetter(t *testing.T) {
	t.Parallel()
	be := binary.BigEndian
	for name, c := range map[string]struct {
		edit   func(batch []byte)
		reason string
	}{
		"checksum": {func(b []byte) { b[len(b)-1] ^= 1 }, "the records at the offsets from 1 to 3 cannot be read: corrupt record batch at offset 1"},
		"format 1": {func(b []byte) {
			clear(b[16:])
			b[16] = 1
			// An old message has the offset of its last record, no key and a value. The checksum begins at the format.
			be.PutUint64(b, 3)
			be.PutUint32(b[26:], 0xffffffff)
			be.PutUint32(b[30:], uint32(len(b)-34))
			be.PutUint32(b[12:], crc32.ChecksumIEEE(b[16:]))
		}, "the records at the offsets from 3 to 3 cannot be read: a message of format 1, from before Kafka 0.11"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := newKit(t, 1)
			list := newMessages(1, 6)
			k.publish(list[0])
			k.publish(list[1:4]...)
			k.publish(list[4:]...)
			k.editBatch(1, c.edit)
			dead := newDisposed()
			consume := k.newConsumer(consumer.WithDisposer(dead))
			addHandler(t, consume, "counted", k.insertInto("effects"))
			k.start(consume)

			k.waitFor("the dead letter", dead.more)
			k.waitUntil("all offsets", func(context.Context) bool { return k.readCommitted(1)[0] == 6 })
			if n := k.countDocuments("effects"); n != 3 {
				t.Errorf("%d messages had their effect", n)
			}
			got := dead.listAll()
			if len(got) != 1 || !strings.Contains(got[0].cause.Error(), c.reason) || consumer.ClassOf(got[0].cause) != deadletter.ClassMalformed {
				t.Errorf("%d messages were disposed of: %+v", len(got), got)
			}
		})
	}
}
