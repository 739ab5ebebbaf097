package keyhash_test

import (
	"fmt"
	"testing"

	"github.com/outrelay/outrelay/internal/contract/keyhash"
)

// The expected values of org.apache.kafka.common.utils.Utils.murmur2 are from the tests of Kafka.
func TestMurmur2IsJavas(t *testing.T) {
	t.Parallel()
	for key, want := range map[string]int32{
		"21": -973932308, "foobar": -790332482, "a-little-bit-long-string": -985981536,
		"a-little-bit-longer-string": -1486304829, "lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
		"abc": 479470107,
	} {
		if got := int32(keyhash.Murmur2([]byte(key))); got != want {
			t.Errorf("%q: %d, want %d", key, got, want)
		}
	}
}

func ExampleSlot() {
	fmt.Println(keyhash.Slot([]byte("o-1")), keyhash.Murmur2([]byte("o-1"))&0x7fffffff%6)
	// Output: 154 0
}
