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
func appendJavaDouble(dst []byte, number float64) []byte {
	abs := math.Abs(number)
	switch {
	case math.IsNaN(number):
		return append(dst, "NaN"...)
	case math.IsInf(number, 1):
		return append(dst, "Infinity"...)
	case math.IsInf(number, -1):
		return append(dst, "-Infinity"...)
	}

	start := len(dst)
	// Java writes these numbers without an exponent.
	if abs == 0 || abs >= 1e-3 && abs < 1e7 {
		dst = strconv.AppendFloat(dst, number, 'f', -1, 64)
		if !bytes.ContainsRune(dst[start:], '.') {
			dst = append(dst, ".0"...)
		}
		return dst
	}

	// Go writes 1e+21, and Java 1.0E21.
	dst = strconv.AppendFloat(dst, number, 'E', -1, 64)
	expStart := start + bytes.IndexByte(dst[start:], 'E')
	exponent, _ := strconv.Atoi(string(dst[expStart+1:])) // cannot fail
	hasPoint := bytes.ContainsRune(dst[start:expStart], '.')
	dst = dst[:expStart]
	if !hasPoint {
		dst = append(dst, ".0"...)
	}
	return strconv.AppendInt(append(dst, 'E'), int64(exponent), 10)
}

// appendJavaEscaped appends text as a part of a JSON string with the escapes of MongoDB's Java driver: it escapes everything
// but letters, digits, spaces, punctuation and symbols of the basic plane.
func appendJavaEscaped(dst, text []byte) []byte {
	var units [2]uint16
	for i := 0; i < len(text); {
		char := text[i]
		if char < utf8.RuneSelf {
			i++
			switch {
			case char == 0x7f:
				dst = append(dst, `\u007f`...)
			case char < ' ' || char == '"' || char == '\\':
				dst = appendEscape(dst, char)
			default:
				dst = append(dst, char)
			}
			continue
		}

		decoded, size := utf8.DecodeRune(text[i:])
		i += size
		if decoded <= 0xffff && isJavaPrintable(decoded) {
			dst = utf8.AppendRune(dst, decoded)
			continue
		}
		// Java escapes the units of UTF-16: two for a character outside of the basic plane.
		for _, unit := range utf16.AppendRune(units[:0], decoded) {
			dst = hex.AppendEncode(append(dst, `\u`...), []byte{byte(unit >> 8), byte(unit)})
		}
	}
	return dst
}

// isJavaPrintable reports whether the Java driver writes the character as it is.
func isJavaPrintable(char rune) bool {
	return unicode.In(char, unicode.L, unicode.N, unicode.P, unicode.S, unicode.Zs) && !unicode.Is(unicode.Lm, char)
}
