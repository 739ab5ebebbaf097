package envelope

import (
	"bytes"
	"encoding/hex"
	"math"
	"strconv"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// appendJavaDouble appends a number as Java's Double.toString does.
func appendJavaDouble(dst []byte, f float64) []byte {
	abs := math.Abs(f)
	switch {
	case math.IsNaN(f):
		return append(dst, "NaN"...)
	case math.IsInf(f, 1):
		return append(dst, "Infinity"...)
	case math.IsInf(f, -1):
		return append(dst, "-Infinity"...)
	}

	start := len(dst)
	// Java writes these numbers without an exponent.
	if abs == 0 || abs >= 1e-3 && abs < 1e7 {
		dst = strconv.AppendFloat(dst, f, 'f', -1, 64)
		if !bytes.ContainsRune(dst[start:], '.') {
			dst = append(dst, ".0"...)
		}
		return dst
	}

	// Go writes 1e+21, and Java 1.0E21.
	dst = strconv.AppendFloat(dst, f, 'E', -1, 64)
	e := start + bytes.IndexByte(dst[start:], 'E')
	exponent, _ := strconv.Atoi(string(dst[e+1:])) // cannot fail
	hasPoint := bytes.ContainsRune(dst[start:e], '.')
	dst = dst[:e]
	if !hasPoint {
		dst = append(dst, ".0"...)
	}
	return strconv.AppendInt(append(dst, 'E'), int64(exponent), 10)
}

// appendJavaEscaped appends s as a part of a JSON string with the escapes of MongoDB's Java driver: it escapes everything
// but letters, digits, spaces, punctuation and symbols of the basic plane.
func appendJavaEscaped(dst, s []byte) []byte {
	var units [2]uint16
	for i := 0; i < len(s); {
		b := s[i]
		if b < utf8.RuneSelf {
			i++
			switch {
			case b == 0x7f:
				dst = append(dst, `\u007f`...)
			case b < ' ' || b == '"' || b == '\\':
				dst = appendEscape(dst, b)
			default:
				dst = append(dst, b)
			}
			continue
		}

		r, size := utf8.DecodeRune(s[i:])
		i += size
		if r <= 0xffff && isJavaPrintable(r) {
			dst = utf8.AppendRune(dst, r)
			continue
		}
		// Java escapes the units of UTF-16: two for a character outside of the basic plane.
		for _, unit := range utf16.AppendRune(units[:0], r) {
			dst = hex.AppendEncode(append(dst, `\u`...), []byte{byte(unit >> 8), byte(unit)})
		}
	}
	return dst
}

// isJavaPrintable reports whether the Java driver writes the character as it is.
func isJavaPrintable(r rune) bool {
	return unicode.In(r, unicode.L, unicode.N, unicode.P, unicode.S, unicode.Zs) && !unicode.Is(unicode.Lm, r)
}
