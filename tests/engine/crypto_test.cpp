#include <cstdio>
#include <random>

#include "check.hpp"
#include "crypto/aes_gcm.hpp"
#include "crypto/crc32c.hpp"
#include "crypto/hmac.hpp"
#include "crypto/library.hpp"

using namespace pipemorph;

namespace {

std::vector<uint8_t> unhex(const std::string& hex) {
    std::vector<uint8_t> out;
    for (size_t i = 0; i < hex.size(); i += 2)
        out.push_back(static_cast<uint8_t>(std::stoi(hex.substr(i, 2), nullptr, 16)));
    return out;
}

std::vector<uint8_t> bytes(const std::string& s) {
    return {s.begin(), s.end()};
}

bool equal(const Digest& digest, const std::string& hex) {
    return equal_constant_time(digest, unhex(hex));
}

}  // namespace

// RFC 4231, test cases 1 to 4, 6 and 7 (5 is about truncation, which nothing here does).
TEST(hmac_vectors) {
    const auto mac = [](Bytes key, Bytes data) { return Hmac(key).update(data).finish(); };
    CHECK(equal(mac(std::vector<uint8_t>(20, 0x0b), bytes("Hi There")),
                "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"));
    CHECK(equal(mac(bytes("Jefe"), bytes("what do ya want for nothing?")),
                "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"));
    CHECK(equal(mac(std::vector<uint8_t>(20, 0xaa), std::vector<uint8_t>(50, 0xdd)),
                "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"));
    CHECK(equal(mac(unhex("0102030405060708090a0b0c0d0e0f10111213141516171819"),
                    std::vector<uint8_t>(50, 0xcd)),
                "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"));
    CHECK(equal(mac(std::vector<uint8_t>(131, 0xaa),
                    bytes("Test Using Larger Than Block-Size Key - Hash Key First")),
                "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"));
    CHECK(equal(mac(std::vector<uint8_t>(131, 0xaa),
                    bytes("This is a test using a larger than block-size key and a larger than "
                          "block-size data. The key needs to be hashed before being used by the "
                          "HMAC algorithm.")),
                "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"));
}

TEST(hmac_does_not_depend_on_how_it_is_fed_nor_on_what_came_before) {
    std::mt19937 random(1);
    std::vector<uint8_t> data(1000);
    for (auto& b : data) b = static_cast<uint8_t>(random());
    const Digest expected = Hmac(bytes("key")).update(data).finish();
    Hmac mac(bytes("key"));
    for (int round = 0; round < 50; ++round) {
        for (size_t at = 0; at < data.size();) {
            const size_t take = std::min<size_t>(random() % 150, data.size() - at);
            mac.update(Bytes(data).subspan(at, take));
            at += take;
        }
        CHECK(mac.finish() == expected);
    }
    CHECK(Hmac({}).update(data).finish() != expected);
    CHECK(equal(Hmac({}).finish(),
                "b613679a0814d9ec772f95d778c35fc5ff1697c493715653c6c712144292c5ad"));
}

// Test case 14 of the submission that became NIST SP 800-38D.
TEST(aes_gcm_vectors) {
    const Digest zero{};
    const std::vector<uint8_t> text(16, 0);
    AesGcm encrypt(zero, AesGcm::Use::encrypt);
    AesGcm decrypt(zero, AesGcm::Use::decrypt);
    for (int round = 0; round < 2; ++round) {
        std::vector<uint8_t> out(16);
        encrypt.begin(0);
        encrypt.apply(out.data(), text);
        CHECK(out == unhex("cea7403d4d606b6e074ec5d3baf39d18"));
        const Tag tag = encrypt.tag();
        CHECK(equal_constant_time(tag, unhex("d0d1c8a799996bf0265b98b5d48ab919")));
        for (const bool right : {true, false}) {
            Tag said = tag;
            said[3] = static_cast<uint8_t>(said[3] ^ !right);
            std::vector<uint8_t> back = out;
            decrypt.begin(0);
            decrypt.apply(back.data(), back);
            CHECK(back == text && decrypt.fits(said) == right);
        }
    }
}

TEST(aes_gcm_does_not_depend_on_how_it_is_fed) {
    std::mt19937 random(1);
    Digest key;
    fill_random(key);
    std::vector<uint8_t> open(224), text(10'000), whole(text.size());
    for (auto& b : open) b = static_cast<uint8_t>(random());
    for (auto& b : text) b = static_cast<uint8_t>(random());
    AesGcm encrypt(key, AesGcm::Use::encrypt);
    encrypt.begin(7);
    encrypt.authenticate(open);
    encrypt.apply(whole.data(), text);
    const Tag tag = encrypt.tag();
    encrypt.begin(8);
    encrypt.authenticate(open);
    encrypt.apply(std::vector<uint8_t>(text.size()).data(), text);
    CHECK(encrypt.tag() != tag);
    for (int round = 0; round < 20; ++round) {
        std::vector<uint8_t> part(text.size());
        encrypt.begin(7);
        encrypt.authenticate(Bytes(open).first(100));
        encrypt.authenticate(Bytes(open).subspan(100));
        for (size_t at = 0; at < text.size();) {
            const size_t take = std::min<size_t>(random() % 700, text.size() - at);
            encrypt.apply(part.data() + at, Bytes(text).subspan(at, take));
            at += take;
        }
        CHECK(part == whole && encrypt.tag() == tag);
    }
}

// One sentence that says what was found, and what to install.
TEST(crypto_library_that_is_not_there_or_another_is_named) {
    const auto last_error = [](std::vector<CryptoLibrary> libraries) {
        std::string why;
        CHECK(!load_crypto(libraries, why));
        CHECK(why.ends_with("OpenSSL 3 or 1.1.1 (Debian: libssl3)"));
        return why;
    };
    const std::string none = last_error({{"libnone.so.1", 0, 1}, {"libnone.so.2", 0, 1}});
    CHECK(none.starts_with("OpenSSL's libcrypto cannot be loaded (libnone.so.1: "));
    CHECK(none.find("libnone.so.2: ") != std::string::npos);
    CHECK(last_error({{"libm.so.6", 0, 1}}).starts_with("libm.so.6 has no OpenSSL_version_num"));
    std::string why;
    const CryptoLibrary libraries[] = {{"libcrypto.so.3", 0x30000000, 0x40000000},
                                       {"libcrypto.so.1.1", 0x10101000, 0x10200000}};
    const auto found = load_crypto(libraries, why);
    CHECK(found && found->version.starts_with("OpenSSL "));
    // The name promises one interface and the library says that it has another.
    for (CryptoLibrary other : libraries) {
        other.first_after = other.least + 1;
        other.least = 0;
        std::string said;
        CHECK(!load_crypto({&other, 1}, said));
        // A machine has one of the two.
        if (!said.starts_with("OpenSSL's"))
            CHECK(said.find("whose interface does not match its name") != std::string::npos);
    }
    CHECK(crypto().version == found->version);
}

TEST(constant_time_comparison_is_right) {
    CHECK(equal_constant_time(bytes("same"), bytes("same")));
    CHECK(!equal_constant_time(bytes("same"), bytes("sane")));
    CHECK(!equal_constant_time(bytes("same"), bytes("samee")));
    CHECK(equal_constant_time({}, {}));
}

// RFC 3720, appendix B.4.
TEST(crc32c_vectors) {
    for (const auto crc : {crc32c, crc32c_narrow, crc32c_software}) {
        CHECK(crc(0, bytes("123456789")) == 0xe3069283);
        CHECK(crc(0, std::vector<uint8_t>(32, 0x00)) == 0x8a9136aa);
        CHECK(crc(0, std::vector<uint8_t>(32, 0xff)) == 0x62a8ab43);
        std::vector<uint8_t> rising(32);
        for (size_t i = 0; i < 32; ++i) rising[i] = static_cast<uint8_t>(i);
        CHECK(crc(0, rising) == 0x46dd794e);
        CHECK(crc(0, {}) == 0);
    }
}

TEST(crc32c_ways_agree) {
    std::printf("crc32c by %s\n",
                crc32c_is_accelerated() ? "the processor's instruction" : "a table");
    std::mt19937 random(2);
    std::vector<uint8_t> data(70'000);
    for (auto& b : data) b = static_cast<uint8_t>(random());
    for (int round = 0; round < 200; ++round) {
        const size_t from = random() % 64;
        const size_t size = random() % (data.size() - from);
        const Bytes part = Bytes(data).subspan(from, size);
        const uint32_t whole = crc32c_software(0, part);
        CHECK(crc32c(0, part) == whole && crc32c_narrow(0, part) == whole);
        const size_t cut = size == 0 ? 0 : random() % size;
        CHECK(crc32c(crc32c(0, part.first(cut)), part.subspan(cut)) == whole);
    }
}
