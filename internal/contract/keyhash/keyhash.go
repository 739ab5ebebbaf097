// Package keyhash contains the hash of ordering keys: it selects the partition of a record and the slot
// of an envelope.
package keyhash

import "encoding/binary"

// Slots is the number of hash values of keys from which a watcher divides its slots (N28).
const Slots = 1024

// Slot returns the slot hash of a key: the low ten bits of its murmur2 hash.
func Slot(key []byte) int32 { return int32(Murmur2(key) & (Slots - 1)) } // N28

// Murmur2 returns the hash with which Kafka's Java client selects a partition: `(Murmur2(key) &
// 0x7fffffff) % partitions`.
func Murmur2(key []byte) uint32 {
	const (
		seed = 0x9747b28c
		m    = 0x5bd1e995
	)
	hash := uint32(seed) ^ uint32(len(key))

	for len(key) >= 4 {
		word := binary.LittleEndian.Uint32(key) * m
		word ^= word >> 24
		hash = hash*m ^ word*m
		key = key[4:]
	}

	switch len(key) {
	case 3:
		hash ^= uint32(key[2]) << 16
		fallthrough
	case 2:
		hash ^= uint32(key[1]) << 8
		fallthrough
	case 1:
		hash = (hash ^ uint32(key[0])) * m
	}

	// The final mix spreads the last bytes over all bits.
	hash ^= hash >> 13
	hash *= m
	return hash ^ hash>>15
}
